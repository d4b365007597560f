# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models from and for other libraries: PyTorch, Flax, Equinox, Keras, peft, ONNX."""

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models of a run as files for production: safetensors, ONNX and PyTorch."""

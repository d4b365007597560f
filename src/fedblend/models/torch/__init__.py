# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch modules as models, and models as PyTorch modules.

``torch.export`` writes a module down as a graph of ATen's core operators; an
interpreter of that graph in JAX runs inside of the compiled simulation, and JAX derives
the gradients. torch is imported where it is used.
"""

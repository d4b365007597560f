# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models: plain JAX ones, by name or by builder, and adapters for other frameworks."""

from fedblend.models.adapters import from_equinox, from_flax
from fedblend.models.char_rnn import char_rnn
from fedblend.models.cnn import cnn, large_cnn
from fedblend.models.dual_encoder import dual_encoder, dual_encoder_loss, spreadout
from fedblend.models.linear import logistic, softmax
from fedblend.models.mlp import mlp
from fedblend.models.model import MODELS, Model, ModelInfo, build

__all__ = [
    "MODELS",
    "Model",
    "ModelInfo",
    "build",
    "char_rnn",
    "cnn",
    "dual_encoder",
    "dual_encoder_loss",
    "from_equinox",
    "from_flax",
    "large_cnn",
    "logistic",
    "mlp",
    "softmax",
    "spreadout",
]

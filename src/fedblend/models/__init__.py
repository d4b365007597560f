# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models: plain JAX ones, by name or by builder, and those of other frameworks."""

from fedblend.models.char_rnn import char_rnn as char_rnn
from fedblend.models.conversion import SWITCHES as SWITCHES
from fedblend.models.conversion import model_from as model_from
from fedblend.models.dual_encoder import dual_encoder as dual_encoder
from fedblend.models.dual_encoder import dual_encoder_loss as dual_encoder_loss
from fedblend.models.dual_encoder import spreadout as spreadout
from fedblend.models.ensemble import Ensemble as Ensemble
from fedblend.models.ensemble import ensemble as ensemble
from fedblend.models.feedforward import cnn as cnn
from fedblend.models.feedforward import large_cnn as large_cnn
from fedblend.models.feedforward import logistic as logistic
from fedblend.models.feedforward import mlp as mlp
from fedblend.models.feedforward import softmax as softmax
from fedblend.models.frameworks import from_equinox as from_equinox
from fedblend.models.frameworks import from_flax as from_flax
from fedblend.models.frameworks import from_keras as from_keras
from fedblend.models.model import MODELS as MODELS
from fedblend.models.model import Model as Model
from fedblend.models.model import ModelInfo as ModelInfo
from fedblend.models.model import build as build
from fedblend.models.neighbors import neighbors as neighbors
from fedblend.models.parts import find_part as find_part
from fedblend.models.products import with_products as with_products
from fedblend.models.residual import resnet18 as resnet18
from fedblend.models.shifted import Shifted as Shifted
from fedblend.models.shifted import shifted as shifted
from fedblend.models.torch.module import from_torch as from_torch
from fedblend.models.torch.module import state_dict as state_dict
from fedblend.models.torch.module import to_torch as to_torch
from fedblend.models.transformer import Architecture as Architecture
from fedblend.models.transformer import Prefixed as Prefixed
from fedblend.models.transformer import build_transformer as build_transformer
from fedblend.models.transformer import load_transformer as load_transformer
from fedblend.models.transformer import save_transformer as save_transformer
from fedblend.models.transformer import text_classifier as text_classifier
from fedblend.models.transformer import transformer as transformer

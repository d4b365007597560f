# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers: decoders, encoders, and the public weights of GPT-2, Llama, BERT."""

from fedblend.models.transformer.architecture import Architecture as Architecture
from fedblend.models.transformer.load import load_transformer as load_transformer
from fedblend.models.transformer.load import save_transformer as save_transformer
from fedblend.models.transformer.model import build_transformer as build_transformer
from fedblend.models.transformer.model import text_classifier as text_classifier
from fedblend.models.transformer.model import transformer as transformer
from fedblend.models.transformer.parameters import Prefixed as Prefixed

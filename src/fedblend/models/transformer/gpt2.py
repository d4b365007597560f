# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of GPT-2's weights.

A product's weight is [inputs, outputs], and that of queries, keys and values is one.
"""

from typing import Any

import numpy as np

from fedblend.models.feedforward import Affine
from fedblend.models.transformer.architecture import Architecture
from fedblend.models.transformer.checkpoint import Checkpoint
from fedblend.models.transformer.parameters import (
    Embedding,
    Layer,
    Scaling,
    Scores,
    Transformer,
)

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
UNUSED = ("attn.bias", "attn.masked_bias", "lm_head.weight")
"""Masks, and the weight of scores where it is that of the embedding."""


def architecture(files: Checkpoint) -> Architecture:
    """The architecture by the configuration."""
    files.expect(
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    width = files.count("n_embd")
    return Architecture(
        files.count("vocab_size"),
        files.count("n_positions"),
        width,
        files.count("n_layer"),
        files.count("n_head"),
        hidden=files.count("n_inner", 4 * width),
        positions="learned",
        norm="layer",
        epsilon=files.setting("layer_norm_epsilon", 1e-5),
        activation=files.word("activation_function", "gelu_new", ACTIVATIONS),
        bias="all",
        tied=bool(files.setting("tie_word_embeddings", True)),
    )


def parameters(files: Checkpoint, form: Architecture) -> Transformer:
    """The weights by their names."""
    top = files.below("transformer.")

    def stacked(name: str) -> Any:
        return files.stacked(f"{top}h.{{}}.{name}", form.layers)

    def product(name: str) -> Affine:
        weight = np.swapaxes(stacked(f"{name}.weight"), 1, 2)
        return Affine(weight, stacked(f"{name}.bias"))

    def scaling(name: str) -> Scaling:
        return Scaling(stacked(f"{name}.weight"), stacked(f"{name}.bias"))

    joint: Any = product("attn.c_attn")
    query, key, value = (
        Affine(*parts)
        for parts in zip(*(np.split(one, 3, axis=1) for one in joint), strict=True)
    )
    layers = Layer(
        scaling("ln_1"),
        query,
        key,
        value,
        product("attn.c_proj"),
        scaling("ln_2"),
        None,
        product("mlp.c_fc"),
        product("mlp.c_proj"),
    )
    tokens, positions = (files.take(f"{top}{name}.weight") for name in ("wte", "wpe"))
    last = Scaling(*(files.take(f"{top}ln_f.{name}") for name in ("weight", "bias")))
    own = None if form.tied else files.take("lm_head.weight")
    files.all_taken(*UNUSED)
    embedding = Embedding(tokens, positions, None)
    return Transformer(embedding, layers, last, None, Scores(own, None))

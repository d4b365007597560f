# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The parameters of a transformer, and their start.

The layers are one named tuple whose leaves have the layers on their first axis, so that
a loop over layers is compiled once. Weights start as those of GPT-2: normal with
deviation 0.02, and less by the root of twice the number of layers where a product is
added to the states; biases at 0, factors of normalizations at 1.

Reference:
    Radford, Wu, Child, Luan, Amodei, Sutskever. Language models are unsupervised
    multitask learners. 2019.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.core import Key, PyTree
from fedblend.models.feedforward import Affine
from fedblend.models.transformer.architecture import Architecture

DEVIATION = 0.02


class Scaling(NamedTuple):
    """What a normalization over channels learns: factors, and addends if any."""

    scale: jax.Array
    offset: jax.Array | None


class Embedding(NamedTuple):
    """Vectors of tokens [vocabulary, width] and places [length, width]."""

    tokens: jax.Array
    positions: jax.Array | None
    norm: Scaling | None


class Layer(NamedTuple):
    """Attention, then the feedforward half, each with its normalization.

    Rows of ``query`` are head by head, those of ``key`` and ``value`` by the heads of
    keys and values.
    """

    attention_norm: Scaling
    query: Affine
    key: Affine
    value: Affine
    out: Affine
    hidden_norm: Scaling
    gate: Affine | None
    up: Affine
    down: Affine


class HeadLayer(NamedTuple):
    """The layer of BERT's heads before the scores."""

    dense: Affine
    norm: Scaling | None


class Scores(NamedTuple):
    """The last layer; the weight is that of the embedding if it is None."""

    weight: jax.Array | None
    bias: jax.Array | None


class Transformer(NamedTuple):
    """The parameters; ``layers`` has the layers on the first axis of its leaves."""

    embedding: Embedding
    layers: Layer
    norm: Scaling | None
    head: HeadLayer | None
    last: Scores


class Prefix(NamedTuple):
    """Learned keys and values before those of a row, [layers, places, heads, width]."""

    key: jax.Array
    value: jax.Array


class Prefixed(NamedTuple):
    """In place of a model's parameters: these, and what ``Model.prefix`` makes."""

    params: PyTree
    prefix: PyTree


def start(form: Architecture, key: Key, dtype) -> Transformer:
    """The parameters at the start."""
    wide = jnp.promote_types(dtype, jnp.float32)

    def normal(name: str, *shape: int, deviation: float = DEVIATION):
        drawn = jax.random.normal(keys.named(key, name), shape, wide)
        return (deviation * drawn).astype(dtype)

    def scaling(*shape: int) -> Scaling:
        offset = jnp.zeros(shape, dtype) if form.norm == "layer" else None
        return Scaling(jnp.ones(shape, dtype), offset)

    def product(name, part, inputs, outputs, deviation=DEVIATION) -> Affine:
        weight = normal(name, form.layers, outputs, inputs, deviation=deviation)
        biased = form.bias in (part, "all")
        return Affine(weight, jnp.zeros(weight.shape[:2], dtype) if biased else None)

    narrow = DEVIATION / math.sqrt(2 * form.layers)
    heads, kv = form.heads * form.wide, form.kv * form.wide
    layers = Layer(
        scaling(form.layers, form.width),
        product("query", "attention", form.width, heads),
        product("key", "attention", form.width, kv),
        product("value", "attention", form.width, kv),
        product("out", "attention", heads, form.width, narrow),
        scaling(form.layers, form.width),
        product("gate", "hidden", form.width, form.inner) if form.gated else None,
        product("up", "hidden", form.width, form.inner),
        product("down", "hidden", form.inner, form.width, narrow),
    )
    learned = form.positions == "learned"
    embedding = Embedding(
        normal("tokens", form.vocabulary, form.width),
        normal("positions", form.length, form.width) if learned else None,
        scaling(form.width) if form.norm_embedding else None,
    )
    head = None
    if form.head != "linear":
        dense = Affine(
            normal("head", form.width, form.width), jnp.zeros(form.width, dtype)
        )
        head = HeadLayer(dense, scaling(form.width) if form.head == "masked" else None)
    scores = form.classes or form.vocabulary
    tied = form.tied and form.classes is None
    biased = form.classes is not None or form.head == "masked"
    return Transformer(
        embedding,
        layers,
        scaling(form.width) if form.norm_order == "before" else None,
        head,
        Scores(
            None if tied else normal("last", scores, form.width),
            jnp.zeros(scores, dtype) if biased else None,
        ),
    )


def start_prefix(form: Architecture, key: Key, length: int, dtype) -> Prefix:
    """Keys and values of a prefix at the start, at least float32: they are trained."""
    shape = (form.layers, length, form.kv, form.wide)
    wide = jnp.promote_types(dtype, jnp.float32)
    both = (keys.named(key, name) for name in Prefix._fields)
    return Prefix(*(DEVIATION * jax.random.normal(own, shape, wide) for own in both))

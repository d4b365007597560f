# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A transformer: sizes and kinds, parameters, and what it computes.

Rows of tokens are x, states of a place are h.

::

    h      = tokens[x] (+ positions)
    layer    q, k, v = W_q n(h), W_k n(h), W_v n(h)           n normalizes
             q, k <- rotated by the angles of their places    (rotary)
             h <- h + W_o softmax(q k' / sqrt(head width)) v  over the places seen
             h <- h + W_down (act(W_gate n(h)) * W_up n(h))   or W_down act(W_up n(h))
    scores = W_last n(h)                                      of every place or row

Products have the dtype of the parameters; normalizations, rotations, the softmax and
scores are at least float32. The softmax is written out:
``jax.nn.dot_product_attention`` rounds it to float32 in float64 computations, too.

A negative token is padding: in an encoder no place sees it, and it is not pooled. A
causal model needs no such rule for padding at the end of a row, which no earlier place
sees.

References:
    Vaswani et al. Attention is all you need. 2017. https://arxiv.org/abs/1706.03762
    Su et al. RoFormer. 2021. https://arxiv.org/abs/2104.09864
    Ainslie et al. GQA. 2023. https://arxiv.org/abs/2305.13245
    Zhang, Sennrich. Root mean square layer normalization. 2019.
    https://arxiv.org/abs/1910.07467
    Shazeer. GLU variants improve transformer. 2020. https://arxiv.org/abs/2002.05202
    Li, Liang. Prefix-tuning. 2021. https://arxiv.org/abs/2101.00190
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend.checks import COUNT, FLAG, optional, words
from fedblend.core import PyTree
from fedblend.errors import UserError
from fedblend.models.feedforward import Affine, linear

EPSILON = 1e-5
"""Under the root of a normalization."""
ROTARY_BASE = 10000.0
"""The slowest angle turns about once in ``2 pi`` times as many places."""
RULES = {
    "vocabulary": COUNT,
    "length": COUNT,
    "width": COUNT,
    "layers": COUNT,
    "heads": COUNT,
    "kv_heads": optional(COUNT),
    "hidden": optional(COUNT),
    "kind": words("llama", "gpt2"),
    "remat": FLAG,
    "unroll": FLAG,
    "classes": optional(COUNT),
}
"""What each field of an architecture may be."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes and kinds of a transformer, see the options of ``transformer``."""

    vocabulary: int
    length: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None
    kind: str = "llama"
    remat: bool = False
    unroll: bool = False
    classes: int | None = None
    """Scores of a row; None for scores of the tokens at every place."""

    def __post_init__(self):
        for name, rule in RULES.items():
            rule(f"transformer: {name}", getattr(self, name))
        if self.heads % self.kv:
            allowed = f"a divisor of heads = {self.heads}"
            raise UserError("transformer: kv_heads", self.kv_heads, allowed)
        if self.width % self.heads:
            allowed = f"a divisor of width = {self.width}"
            raise UserError("transformer: heads", self.heads, allowed)
        if self.llama and self.head_width % 2:
            allowed = "even, which rotary positions need"
            raise UserError("transformer: head_width", self.head_width, allowed)

    @property
    def causal(self) -> bool:
        """Whether a place sees the places before it only: a classifier sees all."""
        return self.classes is None

    @property
    def kv(self) -> int:
        """Heads of keys and values, which groups of ``heads`` share."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.width // self.heads

    @property
    def llama(self) -> bool:
        """Rotary positions, RMS norms, gated SiLU and no biases.

        Else those of GPT-2: learned positions, layer norms, GELU by tanh, and biases.
        """
        return self.kind == "llama"

    @property
    def inner(self) -> int:
        """The width inside of the feedforward half.

        Usually 4 times ``width``; with a gate, 8/3 of it (as many weights), up to a
        multiple of 8.
        """
        usual = -(-8 * self.width // 24) * 8 if self.llama else 4 * self.width
        return self.hidden or usual


class Scaling(NamedTuple):
    """What a normalization over channels learns: factors, and addends if any."""

    scale: jax.Array
    offset: jax.Array | None


class Embedding(NamedTuple):
    """Vectors of tokens [vocabulary, width] and places [length, width]."""

    tokens: jax.Array
    positions: jax.Array | None


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


class Scores(NamedTuple):
    """The last layer; the weight is that of the embedding if it is None."""

    weight: jax.Array | None
    bias: jax.Array | None


class Transformer(NamedTuple):
    """The parameters.

    ``layers`` has the layers on the first axis of its leaves, so that a loop over them
    is compiled once.
    """

    embedding: Embedding
    layers: Layer
    norm: Scaling
    last: Scores


class Prefix(NamedTuple):
    """Learned keys and values before those of a row, [layers, places, heads, width]."""

    key: jax.Array
    value: jax.Array


class Prefixed(NamedTuple):
    """In place of a model's parameters: these, and what ``Model.prefix`` makes."""

    params: PyTree
    prefix: PyTree


class _Places(NamedTuple):
    """What all layers share: the angles of places, and which places see which."""

    angles: jax.Array | None
    seen: jax.Array


def features(
    form: Architecture, params: Transformer | Prefixed, rows: jax.Array
) -> jax.Array:
    """What the last layer gets: [rows, length, width], or [rows, width] of classes."""
    own: Transformer = params.params if isinstance(params, Prefixed) else params
    prefix: Prefix | None = params.prefix if isinstance(params, Prefixed) else None
    tokens = jnp.asarray(rows).astype(jnp.int32)
    length = tokens.shape[1]
    if not form.llama and length > form.length:
        raise UserError("transformer: length", form.length, f"{length}, as rows have")
    here = _embed(form, own, jnp.maximum(tokens, 0))
    places = _places(form, tokens, 0 if prefix is None else prefix.key.shape[1])
    layer = partial(_layer, form, places)
    if form.remat:
        layer = jax.checkpoint(layer, prevent_cse=False)
    unroll = form.layers if form.unroll else 1
    here, _ = jax.lax.scan(layer, here, (own.layers, prefix), unroll=unroll)
    here = normalize(form, own.norm, here)
    return here if form.causal else _pool(tokens >= 0, here)


def scores(params: Transformer | Prefixed, values: jax.Array) -> jax.Array:
    """The last layer, at least float32."""
    own: Transformer = params.params if isinstance(params, Prefixed) else params
    weight = own.embedding.tokens if own.last.weight is None else own.last.weight
    wide = jnp.promote_types(values.dtype, jnp.float32)
    found = jnp.matmul(values, weight.T, preferred_element_type=wide)
    return found if own.last.bias is None else found + _channels(own.last.bias, found)


def normalize(form: Architecture, layer: Scaling, inputs: jax.Array) -> jax.Array:
    """The normalization over channels, computed in at least float32."""
    here = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if not form.llama:
        here = here - here.mean(axis=-1, keepdims=True)
    spread = jnp.square(here).mean(axis=-1, keepdims=True) + EPSILON
    here = (here * jax.lax.rsqrt(spread)).astype(inputs.dtype)
    here = here * _channels(layer.scale, here)
    return here if layer.offset is None else here + _channels(layer.offset, here)


def _embed(form: Architecture, params: Transformer, tokens: jax.Array) -> jax.Array:
    table = params.embedding
    here = table.tokens[tokens]
    if table.positions is not None:
        here = here + table.positions[None, : tokens.shape[1]]
    return here


def _places(form: Architecture, tokens: jax.Array, prefix: int) -> _Places:
    """``seen`` is [rows or 1, heads, groups, places or 1, places with the prefix]."""
    length = tokens.shape[1]
    angles = None
    if form.llama:
        turns = jnp.arange(0, form.head_width, 2) / form.head_width
        speeds = jnp.asarray(ROTARY_BASE, turns.dtype) ** -turns
        angles = jnp.arange(length).astype(turns.dtype)[:, None] * speeds[None]
    if form.causal:
        place = jnp.arange(length)
        seen = (place[:, None] >= place[None, :])[None]
    else:
        seen = (tokens >= 0)[:, None, :]
    seen = jnp.pad(seen, ((0, 0), (0, 0), (prefix, 0)), constant_values=True)
    return _Places(angles, seen[:, None, None])


def _layer(
    form: Architecture,
    places: _Places,
    here: jax.Array,
    given: tuple[Layer, Prefix | None],
) -> tuple[jax.Array, None]:
    """One layer, as a step of a scan."""
    layer, prefix = given
    inputs = normalize(form, layer.attention_norm, here)
    here = here + _attention(form, places, layer, prefix, inputs)
    inputs = normalize(form, layer.hidden_norm, here)
    return here + _feedforward(layer, inputs), None


def _attention(
    form: Architecture,
    places: _Places,
    layer: Layer,
    prefix: Prefix | None,
    here: jax.Array,
) -> jax.Array:
    rows, length, _ = here.shape
    query = linear(layer.query, here).reshape(rows, length, form.heads, form.head_width)
    key, value = (
        linear(part, here).reshape(rows, length, form.kv, form.head_width)
        for part in (layer.key, layer.value)
    )
    if places.angles is not None:
        query, key = _rotate(places.angles, query), _rotate(places.angles, key)
    if prefix is not None:
        key, value = _prepend(prefix.key, key), _prepend(prefix.value, value)
    wide = jnp.promote_types(here.dtype, jnp.float32)
    grouped = query.reshape(
        rows, length, form.kv, form.heads // form.kv, form.head_width
    )
    weight = jnp.einsum(
        "rtkgd,rskd->rkgts", grouped, key, preferred_element_type=wide
    ) / math.sqrt(form.head_width)
    weight = jnp.where(places.seen, weight, jnp.finfo(wide).min)
    weight = jax.nn.softmax(weight, axis=-1).astype(here.dtype)
    mixed = jnp.einsum("rkgts,rskd->rtkgd", weight, value)
    return linear(layer.out, mixed.reshape(rows, length, form.heads * form.head_width))


def _rotate(angles: jax.Array, inputs: jax.Array) -> jax.Array:
    """[rows, length, heads, width] with the halves of a head as pairs to rotate."""
    wide = jnp.promote_types(inputs.dtype, jnp.float32)
    turn = angles[None, :, None]
    cos, sin = jnp.cos(turn), jnp.sin(turn)
    first, second = jnp.split(inputs.astype(wide), 2, axis=-1)
    both = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(both, axis=-1).astype(inputs.dtype)


def _prepend(prefix: jax.Array, own: jax.Array) -> jax.Array:
    """Keys or values of all rows behind those of the prefix."""
    shape = (own.shape[0], *prefix.shape)
    before = jnp.broadcast_to(prefix.astype(own.dtype)[None], shape)
    return jnp.concatenate([before, own], axis=1)


def _feedforward(layer: Layer, here: jax.Array) -> jax.Array:
    up = linear(layer.up, here)
    if layer.gate is None:
        return linear(layer.down, jax.nn.gelu(up, approximate=True))
    return linear(layer.down, jax.nn.silu(linear(layer.gate, here)) * up)


def _pool(known: jax.Array, here: jax.Array) -> jax.Array:
    """The mean features of a row's places that are not padding."""
    wide = jnp.promote_types(here.dtype, jnp.float32)
    weights = known.astype(wide)
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1)
    total = (here.astype(wide) * weights[:, :, None]).sum(axis=1)
    return (total / count).astype(here.dtype)


def _channels(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.astype(like.dtype).reshape((1,) * (like.ndim - 1) + values.shape)

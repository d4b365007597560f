# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a transformer computes. Rows of tokens are x, states of a place are h.

::

    h      = tokens[x] (+ positions)                          normalized, if asked for
    layer    q, k, v = W_q n(h), W_k n(h), W_v n(h)           n normalizes
             q, k <- rotated by the angles of their places    (rotary)
             h <- h + W_o softmax(q k' / sqrt(head width)) v  over the places seen
             h <- h + W_down (act(W_gate n(h)) * W_up n(h))   or W_down act(W_up n(h))
    scores = W_last n(h)                                      of every place or row

With ``norm_order="after"`` n is applied to the sums and not inside of them. Products
have the dtype of the parameters; normalizations, rotations, the softmax and scores are
at least float32. The softmax is written out, as ``jax.nn.dot_product_attention``
rounds it to float32 in float64 computations, too.

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

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend.errors import UserError
from fedblend.models.feedforward import linear
from fedblend.models.transformer.architecture import Architecture
from fedblend.models.transformer.parameters import (
    Layer,
    Prefix,
    Prefixed,
    Scaling,
    Transformer,
)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class _Places(NamedTuple):
    """What all layers share: the angles of places, and which places see which."""

    angles: jax.Array | None
    seen: jax.Array | None


def features(
    form: Architecture, params: Transformer | Prefixed, rows: jax.Array
) -> jax.Array:
    """What the last layer gets: [rows, length, width], or [rows, width] of classes."""
    own: Transformer = params.params if isinstance(params, Prefixed) else params
    prefix: Prefix | None = params.prefix if isinstance(params, Prefixed) else None
    tokens = jnp.asarray(rows).astype(jnp.int32)
    length = tokens.shape[1]
    if form.positions == "learned" and length > form.length:
        raise UserError("transformer: length", form.length, f"{length}, as rows have")
    here = _embedded(form, own, jnp.maximum(tokens, 0))
    places = _places(form, tokens, 0 if prefix is None else prefix.key.shape[1])
    layer = partial(_layer, form, places)
    if form.remat:
        layer = jax.checkpoint(layer, prevent_cse=False)
    unroll = form.layers if form.unroll else 1
    here, _ = jax.lax.scan(layer, here, (own.layers, prefix), unroll=unroll)
    if own.norm is not None:
        here = normalize(form, own.norm, here)
    if form.classes is not None:
        here = _pooled(form, tokens >= 0, here)
    if own.head is None:
        return here
    here = linear(own.head.dense, here)
    if own.head.norm is None:
        return jnp.tanh(here)
    return normalize(form, own.head.norm, _activation(form)(here))


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
    if form.norm == "layer":
        here = here - here.mean(axis=-1, keepdims=True)
    spread = jnp.square(here).mean(axis=-1, keepdims=True) + form.epsilon
    here = (here * jax.lax.rsqrt(spread)).astype(inputs.dtype)
    here = here * _channels(layer.scale, here)
    return here if layer.offset is None else here + _channels(layer.offset, here)


def _embedded(form: Architecture, params: Transformer, tokens: jax.Array) -> jax.Array:
    table = params.embedding
    here = table.tokens[tokens]
    if table.positions is not None:
        here = here + table.positions[None, : tokens.shape[1]]
    return here if table.norm is None else normalize(form, table.norm, here)


def _places(form: Architecture, tokens: jax.Array, prefix: int) -> _Places:
    """``seen`` is [rows or 1, heads, groups, places or 1, places with the prefix]."""
    length = tokens.shape[1]
    angles = None
    if form.positions == "rotary":
        turns = jnp.arange(0, form.wide, 2) / form.wide
        speeds = jnp.asarray(form.rotary_base, turns.dtype) ** -turns
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
    halves = (
        (layer.attention_norm, lambda h: _attention(form, places, layer, prefix, h)),
        (layer.hidden_norm, lambda h: _feedforward(form, layer, h)),
    )
    for norm, half in halves:
        if form.norm_order == "before":
            here = here + half(normalize(form, norm, here))
        else:
            here = normalize(form, norm, here + half(here))
    return here, None


def _attention(
    form: Architecture,
    places: _Places,
    layer: Layer,
    prefix: Prefix | None,
    here: jax.Array,
) -> jax.Array:
    rows, length, _ = here.shape
    query = linear(layer.query, here).reshape(rows, length, form.heads, form.wide)
    key, value = (
        linear(part, here).reshape(rows, length, form.kv, form.wide)
        for part in (layer.key, layer.value)
    )
    if places.angles is not None:
        query, key = _rotated(places.angles, query), _rotated(places.angles, key)
    if prefix is not None:
        key, value = _after(prefix.key, key), _after(prefix.value, value)
    wide = jnp.promote_types(here.dtype, jnp.float32)
    grouped = query.reshape(rows, length, form.kv, form.heads // form.kv, form.wide)
    weight = jnp.einsum(
        "rtkgd,rskd->rkgts", grouped, key, preferred_element_type=wide
    ) / math.sqrt(form.wide)
    if places.seen is not None:
        weight = jnp.where(places.seen, weight, jnp.finfo(wide).min)
    weight = jax.nn.softmax(weight, axis=-1).astype(here.dtype)
    mixed = jnp.einsum("rkgts,rskd->rtkgd", weight, value)
    return linear(layer.out, mixed.reshape(rows, length, form.heads * form.wide))


def _rotated(angles: jax.Array, inputs: jax.Array) -> jax.Array:
    """[rows, length, heads, width] with the halves of a head as pairs to rotate."""
    wide = jnp.promote_types(inputs.dtype, jnp.float32)
    turn = angles[None, :, None]
    cos, sin = jnp.cos(turn), jnp.sin(turn)
    first, second = jnp.split(inputs.astype(wide), 2, axis=-1)
    both = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(both, axis=-1).astype(inputs.dtype)


def _after(prefix: jax.Array, own: jax.Array) -> jax.Array:
    """Keys or values of all rows behind those of the prefix."""
    shape = (own.shape[0], *prefix.shape)
    before = jnp.broadcast_to(prefix.astype(own.dtype)[None], shape)
    return jnp.concatenate([before, own], axis=1)


def _feedforward(form: Architecture, layer: Layer, here: jax.Array) -> jax.Array:
    up = linear(layer.up, here)
    if layer.gate is None:
        return linear(layer.down, _activation(form)(up))
    return linear(layer.down, _activation(form)(linear(layer.gate, here)) * up)


def _activation(form: Architecture) -> Callable[[jax.Array], jax.Array]:
    return ACTIVATIONS[form.activation.removesuffix("_gated")]


def _pooled(form: Architecture, known: jax.Array, here: jax.Array) -> jax.Array:
    """The features of a row from those of its places that are not padding."""
    if form.pool == "first":
        return here[:, 0]
    wide = jnp.promote_types(here.dtype, jnp.float32)
    weights = known.astype(wide)
    count = jnp.maximum(weights.sum(axis=1, keepdims=True), 1)
    total = (here.astype(wide) * weights[:, :, None]).sum(axis=1)
    return (total / count).astype(here.dtype)


def _channels(values: jax.Array, like: jax.Array) -> jax.Array:
    return values.astype(like.dtype).reshape((1,) * (like.ndim - 1) + values.shape)

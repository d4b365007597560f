# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A transformer in NumPy, float64: one row, one layer, one head, one place at a time.

Written from the papers that ``transformer_layers`` names, and from the
architecture's words alone.
"""

import math
from typing import Any

import numpy as np

EPSILON, ROTARY_BASE = 1e-5, 10000.0


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def affine(layer, x):
    y = layer.weight @ x
    return y if layer.bias is None else y + layer.bias


def norm(form, layer, x):
    if form.kind == "llama":
        return layer.scale * x / np.sqrt((x**2).mean() + EPSILON)
    spread = np.sqrt(x.var() + EPSILON)
    return layer.scale * (x - x.mean()) / spread + layer.offset


def rotate(form, place, x):
    """Pairs (j, j + half) of a head turn by place / base^(2j / width)."""
    half = len(x) // 2
    y = np.zeros_like(x)
    for j in range(half):
        a = place / ROTARY_BASE ** (2 * j / len(x))
        y[j] = x[j] * np.cos(a) - x[j + half] * np.sin(a)
        y[j + half] = x[j + half] * np.cos(a) + x[j] * np.sin(a)
    return y


def attention(form, layer, states, known, prefix):
    """``states`` of all places, those that a place may see only if ``known``."""
    wide = form.width // form.heads
    kv = form.kv_heads or form.heads
    queries = [affine(layer.query, x).reshape(form.heads, wide) for x in states]
    keys = [affine(layer.key, x).reshape(kv, wide) for x in states]
    values = [affine(layer.value, x).reshape(kv, wide) for x in states]
    if form.kind == "llama":
        for t in range(len(states)):
            queries[t] = np.array([rotate(form, t, head) for head in queries[t]])
            keys[t] = np.array([rotate(form, t, head) for head in keys[t]])
    out = []
    for t in range(len(states)):
        seen = [s for s in range(len(states)) if (s <= t if form.causal else known[s])]
        mixed = []
        for head in range(form.heads):
            group = head // (form.heads // kv)
            k, v = [keys[s][group] for s in seen], [values[s][group] for s in seen]
            if prefix is not None:
                k = [*prefix.key[:, group], *k]
                v = [*prefix.value[:, group], *v]
            weights = softmax(np.array([queries[t][head] @ x for x in k]) / wide**0.5)
            mixed.append(sum(w * x for w, x in zip(weights, v, strict=True)))
        out.append(affine(layer.out, np.concatenate(mixed)))
    return out


def feedforward(form, layer, x):
    if form.kind == "llama":
        inner = silu(affine(layer.gate, x)) * affine(layer.up, x)
    else:
        inner = gelu_tanh(affine(layer.up, x))
    return affine(layer.down, inner)


def layer_at(stacked, place) -> Any:
    """One layer of stacked ones."""
    if stacked is None or isinstance(stacked, np.ndarray):
        return None if stacked is None else stacked[place]
    return type(stacked)(*(layer_at(part, place) for part in stacked))


def row_scores(form, params, row, prefix=None):
    known = [token >= 0 for token in row]
    h = [params.embedding.tokens[max(token, 0)] for token in row]
    if form.kind == "gpt2":
        h = [x + params.embedding.positions[t] for t, x in enumerate(h)]
    for place in range(form.layers):
        own = layer_at(params.layers, place)
        before = layer_at(prefix, place)
        normed = [norm(form, own.attention_norm, x) for x in h]
        more = attention(form, own, normed, known, before)
        h = [x + y for x, y in zip(h, more, strict=True)]
        h = [x + feedforward(form, own, norm(form, own.hidden_norm, x)) for x in h]
    h = [norm(form, params.norm, x) for x in h]
    if form.classes is not None:
        used = [x for x, one in zip(h, known, strict=True) if one]
        h = [sum(used) / len(used)]
    weight = params.last.weight
    if weight is None:
        weight = params.embedding.tokens
    scores = [weight @ x for x in h]
    if params.last.bias is not None:
        scores = [x + params.last.bias for x in scores]
    return scores[0] if form.classes is not None else np.array(scores)


def scores(form, params, rows, prefix=None):
    return np.array([row_scores(form, params, row, prefix) for row in rows])

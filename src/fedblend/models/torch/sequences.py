# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""ATen's operators for sequences, in JAX: embeddings, recurrent layers, attention.

Recurrent layers are loops (``scan``), so that the time to compile does not grow with
the length of a sequence, as it does where PyTorch writes the loop out.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fedblend.core import PyTree

Weights = Sequence[jax.Array]
Step = Callable[[Weights, PyTree, jax.Array], PyTree]
"""``step(weights, state, gates_of_input) -> state``; the first of a state is h."""
BAGS = ("sum", "mean", "max")


def _embedding(weight, index, padding=-1, *_):
    rows = weight[index]
    if padding < 0:
        return rows
    # PyTorch never trains the row of the padding.
    return jnp.where((index == padding)[..., None], lax.stop_gradient(rows), rows)


def _embedding_bag(
    weight,
    index,
    offsets,
    by_count=False,
    mode=0,
    sparse=False,
    each=None,
    last_offset=False,
    padding=-1,
):
    """Sums, means or maxima of the rows from each offset to the next."""
    del by_count, sparse
    bags = len(offsets) - last_offset
    own = jnp.searchsorted(offsets[:bags], jnp.arange(len(index)), side="right") - 1
    own = jnp.where(index == padding, bags, own)  # beyond the last: does not count
    rows = weight[index]
    rows = rows if each is None else rows * each[:, None]
    counts = jax.ops.segment_sum(jnp.ones_like(index), own, bags)[:, None]
    if BAGS[mode] == "max":
        largest = jax.ops.segment_max(rows, own, bags)
        return jnp.where(counts > 0, largest, 0), None, None, None
    total = jax.ops.segment_sum(rows, own, bags)
    mean = total / jnp.maximum(counts, 1).astype(total.dtype)
    return (mean if BAGS[mode] == "mean" else total), None, None, None


def _lstm_step(weights: Weights, state, gates):
    hidden, cell = state
    gates = gates + hidden @ weights[1].T + (weights[3] if len(weights) > 3 else 0)
    entry, forget, new, out = jnp.split(gates, 4, axis=-1)
    kept = jax.nn.sigmoid(forget) * cell
    cell = kept + jax.nn.sigmoid(entry) * jnp.tanh(new)
    hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
    projected = len(weights) in (3, 5)
    return (hidden @ weights[-1].T if projected else hidden), cell


def _gru_step(weights: Weights, state, gates):
    (hidden,) = state
    own = hidden @ weights[1].T + (weights[3] if len(weights) > 3 else 0)
    (ours, new), (theirs, old) = (
        jnp.split(one, [2 * hidden.shape[-1]], axis=-1) for one in (gates, own)
    )
    reset, update = jnp.split(jax.nn.sigmoid(ours + theirs), 2, axis=-1)
    proposed = jnp.tanh(new + reset * old)
    return (proposed + update * (hidden - proposed),)


def _rnn_step(activation, weights: Weights, state, gates):
    own = state[0] @ weights[1].T + (weights[3] if len(weights) > 3 else 0)
    return (activation(gates + own),)


def _direction(step: Step, weights: Weights, inputs, state, backward: bool):
    """One layer in one direction over [time, rows, features]."""
    gates = inputs @ weights[0].T  # of all times at once
    gates = gates + weights[2] if len(weights) > 3 else gates

    def advance(state, now):
        state = step(weights, state, now)
        return state, state[0]

    return lax.scan(advance, state, gates, reverse=backward)


def _recurrent(
    step: Step,
    inputs,
    first,
    weights,
    biased,
    layers,
    dropout,
    training,
    both,
    batch_first,
):
    """All layers of a recurrent network, as ``aten.lstm.input`` and the like."""
    del dropout, training
    states = first if isinstance(first, list | tuple) else [first]
    directions = 1 + both
    each = len(weights) // (layers * directions)
    del biased  # ``each`` says so
    here = jnp.swapaxes(inputs, 0, 1) if batch_first else inputs
    ends = []
    for layer in range(layers):
        outputs = []
        for backward in range(directions):
            place = layer * directions + backward
            own = weights[place * each : (place + 1) * each]
            state = tuple(one[place] for one in states)
            end, output = _direction(step, own, here, state, bool(backward))
            ends.append(end)
            outputs.append(output)
        here = jnp.concatenate(outputs, axis=-1)
    outputs = jnp.swapaxes(here, 0, 1) if batch_first else here
    return outputs, *(jnp.stack(one) for one in zip(*ends, strict=True))


def _attention(
    query,
    key,
    value,
    mask=None,
    dropout=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Scaled dot product attention; a query that may see nothing gives zeros."""
    del dropout
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(one, times, axis=-3) for one in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ jnp.swapaxes(key, -1, -2)
    if is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None and mask.dtype == bool:
        scores = jnp.where(mask, scores, -jnp.inf)
    elif mask is not None:
        scores = scores + mask
    largest = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return (weights / jnp.where(total == 0, 1, total)) @ value


SEQUENCES: dict[str, Callable[..., PyTree]] = {
    "_embedding_bag": _embedding_bag,
    "embedding": _embedding,
    "gru.input": partial(_recurrent, _gru_step),
    "lstm.input": partial(_recurrent, _lstm_step),
    "rnn_relu.input": partial(_recurrent, partial(_rnn_step, jax.nn.relu)),
    "rnn_tanh.input": partial(_recurrent, partial(_rnn_step, jnp.tanh)),
    "scaled_dot_product_attention": _attention,
}
"""By the operator's name, with the overload where overloads differ."""

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""ATen's operators that are layers of a network, in JAX.

A convolution is a matrix product over the concatenated shifted copies of its input:
under ``vmap`` over clients it stays a batched product, where XLA's own convolution
becomes a grouped one, which is slow on a CPU. Recurrent layers are loops (``scan``), so
that the time to compile does not grow with the length of a sequence.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedblend.batch_statistics import Statistic, is_statistic, standardize
from fedblend.core import PyTree
from fedblend.errors import InputError
from fedblend.models.feedforward import Training

Sizes = Sequence[int]
Weights = Sequence[jax.Array]
Step = Callable[[Weights, PyTree, jax.Array], PyTree]
"""``step(weights, state, gates_of_input) -> state``; the first of a state is h."""
BAGS = ("sum", "mean", "max")


def _linear(x, weight, bias=None):
    outputs = x @ weight.T
    return outputs if bias is None else outputs + bias


def _addmm(bias, x, y, beta=1, alpha=1):
    outputs = x @ y
    outputs = outputs if alpha == 1 else alpha * outputs
    return outputs + (bias if beta == 1 else beta * bias)


def _each(values: int | Sizes, axes: int) -> list[int]:
    """One number for each axis, from one for all or one for each."""
    return np.broadcast_to(values, axes).tolist()


def _pad(x, sizes: Sizes, value, ceil: Sizes | None = None):
    """The last axes with this padding on both sides, and more above by ``ceil``."""
    more = ceil or [0] * len(sizes)
    edges = [(size, size + extra, 0) for size, extra in zip(sizes, more, strict=True)]
    whole = [(0, 0, 0)] * (x.ndim - len(sizes)) + edges
    return lax.pad(x, jnp.asarray(value, x.dtype), whole)


def _shifts(x, kernel: Sizes, stride: Sizes, dilation: Sizes, first: int):
    """The copies of ``x`` that each place of a kernel sees, along axes from ``first``.

    Without padding; places are in row-major order.
    """
    sizes = x.shape[first : first + len(kernel)]
    wide = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    counts = [(n - w) // s for n, w, s in zip(sizes, wide, stride, strict=True)]
    for place in product(*map(range, kernel)):
        starts = [at * d for at, d in zip(place, dilation, strict=True)]
        windows = tuple(
            slice(start, start + count * step + 1, step)
            for start, count, step in zip(starts, counts, stride, strict=True)
        )
        yield x[(slice(None),) * first + windows]


def _convolution(
    x, weight, bias, stride, padding, dilation, transposed, out_padding, groups
):
    axes = weight.ndim - 2
    alone = x.ndim == axes + 1  # a single row
    x = x[None] if alone else x
    stride, padding, dilation = (
        _each(one, axes) for one in (stride, padding, dilation)
    )
    if transposed:
        outputs = _convolve_transposed(
            x, weight, stride, padding, dilation, _each(out_padding, axes), groups
        )
    else:
        outputs = _convolve(_pad(x, padding, 0.0), weight, stride, dilation, groups)
    if bias is not None:
        outputs = outputs + bias.reshape(-1, *[1] * axes)
    return outputs[0] if alone else outputs


def _convolve(x, weight, stride, dilation, groups):
    """[rows, channels, ...] with weights [outputs, channels / groups, kernel...].

    The rows come after the channels: long axes last make both copies and product fast.
    """
    outputs, each, *kernel = weight.shape
    first = jnp.moveaxis(x, 0, 1)
    apart = first.reshape(groups, each, *first.shape[1:])
    copies = jnp.concatenate(list(_shifts(apart, kernel, stride, dilation, 3)), axis=1)
    sizes = copies.shape[2:]
    flat = jnp.moveaxis(weight, 1, -1).reshape(groups, outputs // groups, -1)
    result = flat @ copies.reshape(groups, copies.shape[1], -1)
    return jnp.moveaxis(result.reshape(outputs, *sizes), 1, 0)


def _convolve_transposed(x, weight, stride, padding, dilation, out_padding, groups):
    """The gradient of a convolution, as a layer; weights [channels, outputs / g, k]."""
    axes = weight.ndim - 2
    channels, each, *kernel = weight.shape
    flipped = jnp.flip(weight, range(2, weight.ndim))
    apart = flipped.reshape(groups, channels // groups, each, *kernel)
    turned = jnp.swapaxes(apart, 1, 2).reshape(-1, channels // groups, *kernel)
    edges = [
        (d * (k - 1) - p, d * (k - 1) - p + more)
        for d, k, p, more in zip(dilation, kernel, padding, out_padding, strict=True)
    ]
    whole = [(0, 0, 0), (0, 0, 0)]
    whole += [(*edges[axis], stride[axis] - 1) for axis in range(axes)]
    spread = lax.pad(x, jnp.zeros((), x.dtype), whole)
    return _convolve(spread, turned, [1] * axes, dilation, groups)


def _ceiling(x, kernel, stride, padding, dilation) -> list[int]:
    """How much more padding above makes the last window whole."""
    more = []
    sizes = x.shape[x.ndim - len(kernel) :]
    for n, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        count = -(-room // s)
        if count * s >= n + p:  # a window must start inside
            count -= 1
        more.append(max(count * s - room, 0))
    return more


def _max_pool(x, kernel, stride=(), padding=(0,), dilation=(1,), ceil=False):
    """The maximum of windows; the first of several largest has the derivative."""
    axes = len(kernel)
    stride = _each(stride, axes) if stride else kernel
    padding, dilation = _each(padding, axes), _each(dilation, axes)
    more = _ceiling(x, kernel, stride, padding, dilation) if ceil else None
    padded = _pad(x, padding, -jnp.inf, more)
    copies = _shifts(padded, kernel, stride, dilation, x.ndim - axes)
    largest = next(copies)
    for copy in copies:
        largest = jnp.where(largest >= copy, largest, copy)
    return largest, None


def _avg_pool(
    x, kernel, stride=(), padding=(0,), ceil=False, count_padding=True, divisor=None
):
    axes = len(kernel)
    stride = _each(stride, axes) if stride else kernel
    padding, ones = _each(padding, axes), [1] * axes
    more = _ceiling(x, kernel, stride, padding, ones) if ceil else None

    def total(values, inside):
        padded = _pad(_pad(values, padding, inside), [0] * axes, 0.0, more)
        return sum(_shifts(padded, kernel, stride, ones, values.ndim - axes))

    if divisor is None and (more or not count_padding):
        spatial = jnp.ones(x.shape[x.ndim - axes :], x.dtype)
        return total(x, 0.0) / total(spatial, 1.0 if count_padding else 0.0)
    return total(x, 0.0) / (divisor or math.prod(kernel))


def _bounds(size: int, count: int) -> list[tuple[int, int]]:
    """The windows of adaptive pooling: where each begins and ends."""
    return [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]


def _adaptive_avg_pool(x, counts):
    """The mean of windows along each of the last axes, as a product with weights."""
    for axis, count in zip(range(x.ndim - len(counts), x.ndim), counts, strict=True):
        size = x.shape[axis]
        bounds = _bounds(size, size if count is None else count)
        at = jnp.arange(size)
        weights = jnp.stack([((at >= a) & (at < b)) / (b - a) for a, b in bounds])
        mean = jnp.tensordot(x, weights.astype(x.dtype), (axis, 1))
        x = jnp.moveaxis(mean, -1, axis)
    return x


def _adaptive_max_pool(x, counts):
    sizes = x.shape[x.ndim - len(counts) :]
    cells = []
    for windows in product(
        *(_bounds(n, c) for n, c in zip(sizes, counts, strict=True))
    ):
        cut = x[(..., *(slice(*window) for window in windows))]
        flat = cut.reshape(*x.shape[: x.ndim - len(counts)], -1)
        first = flat.argmax(axis=-1, keepdims=True)
        cells.append(jnp.take_along_axis(flat, first, axis=-1))
    stacked = jnp.concatenate(cells, axis=-1)
    return stacked.reshape(*stacked.shape[:-1], *counts), None


def _normalize(x, axes, eps):
    mean = x.mean(axis=axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axis=axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + eps)


def _scale(x, weight, bias):
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(x, shape, weight, bias, eps):
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    return _scale(_normalize(x, axes, eps), weight, bias), None, None


def _channel_shape(values, axes: int):
    return None if values is None else values.reshape(-1, *[1] * (axes - 2))


def _group_norm(x, weight, bias, rows, channels, size, groups, eps):
    del channels, size
    apart = x.reshape(rows, groups, -1)
    here = _normalize(apart, (2,), eps).reshape(x.shape)
    weight, bias = _channel_shape(weight, x.ndim), _channel_shape(bias, x.ndim)
    return _scale(here, weight, bias), None, None


def _frozen_batch_norm(x, weight, bias, mean, variance, momentum, eps):
    """By running statistics: parameters of the model, or constants."""
    del momentum
    mean, variance = (
        one if is_statistic(one) else Statistic(one) for one in (mean, variance)
    )
    here = standardize(x, mean, variance, training=False, channel=1, epsilon=eps)
    weight, bias = _channel_shape(weight, x.ndim), _channel_shape(bias, x.ndim)
    return _scale(here, weight, bias), None, None


def _batch_norm(now, x, weight, bias, mean, variance, training, momentum, eps):
    """By the rows that count; what follows them are the parameters themselves."""
    del training, momentum
    mask = now.mask
    if mask is not None:
        times, rest = divmod(len(x), len(mask))
        if rest:
            raise InputError(
                "from_torch: batch normalization over other rows than those of the "
                "inputs cannot leave out padded rows; train with fb.Work(.., steps=..)"
            )
        mask = jnp.repeat(mask, times)  # rows by places
    here = standardize(
        x, mean, variance, training=True, mask=mask, channel=1, epsilon=eps
    )
    weight, bias = _channel_shape(weight, x.ndim), _channel_shape(bias, x.ndim)
    return _scale(here, weight, bias), None, None, None, None


def _instance_norm(x, weight, bias, training, momentum, eps):
    """As ``InstanceNorm`` asks for it: one row that has all channels of all rows."""
    del training, momentum
    axes = (0, *range(2, x.ndim))
    here = _normalize(x, axes, eps)
    weight, bias = _channel_shape(weight, x.ndim), _channel_shape(bias, x.ndim)
    return _scale(here, weight, bias), None, None


LAYERS: dict[str, Callable[..., PyTree]] = {
    "_adaptive_avg_pool2d": _adaptive_avg_pool,
    "_adaptive_avg_pool3d": _adaptive_avg_pool,
    "_native_batch_norm_legit.no_stats": _instance_norm,
    "_native_batch_norm_legit_no_training": _frozen_batch_norm,
    "adaptive_max_pool2d": _adaptive_max_pool,
    "addmm": _addmm,
    "avg_pool2d": _avg_pool,
    "avg_pool3d": _avg_pool,
    "bmm": jnp.matmul,
    "convolution": _convolution,
    "linear": _linear,
    "max_pool2d_with_indices": _max_pool,
    "max_pool3d_with_indices": _max_pool,
    "mm": jnp.matmul,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
}
"""By the operator's name, with the overload where overloads differ."""


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
    now: Training,
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
    drop = now._replace(rate=dropout if training else 0.0).drop
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
        here = here if layer == layers - 1 else drop(layer, here)
    outputs = jnp.swapaxes(here, 0, 1) if batch_first else here
    return outputs, *(jnp.stack(one) for one in zip(*ends, strict=True))


def _attention(
    now: Training,
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
    weights = weights / jnp.where(total == 0, 1, total)
    return now._replace(rate=dropout).drop(0, weights) @ value


def _dropout(now: Training, x, rate, training=None):
    rate = 0.0 if training is False else rate
    return now._replace(rate=rate).drop(0, x), None


def _bernoulli(now: Training, x, chance):
    if now.key is None:
        raise InputError("from_torch: the module draws in evaluation, too")
    return jax.random.bernoulli(now.key, chance, x.shape)


SEQUENCES: dict[str, Callable[..., PyTree]] = {
    "_embedding_bag": _embedding_bag,
    "embedding": _embedding,
}
"""By the operator's name, with the overload where overloads differ."""

IN_TRAINING: dict[str, Callable[..., PyTree]] = {
    "_native_batch_norm_legit_functional": _batch_norm,
    "bernoulli.p": _bernoulli,
    "gru.input": partial(_recurrent, _gru_step),
    "lstm.input": partial(_recurrent, _lstm_step),
    "rnn_relu.input": partial(_recurrent, partial(_rnn_step, jax.nn.relu)),
    "rnn_tanh.input": partial(_recurrent, partial(_rnn_step, jnp.tanh)),
    "native_dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}
"""Those that differ in training; their first argument is the training step."""

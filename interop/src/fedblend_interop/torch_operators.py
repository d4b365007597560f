# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""ATen's operators on single entries, reductions, and those that move entries, in JAX.

Only those are here that are left when ``torch.export`` has taken the others apart.

Where a function has a kink, the derivative there is PyTorch's: 0 for ReLU at 0, 1 for
``clamp`` at its bounds, the first of several largest entries for ``max`` along an axis.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedblend.core import PyTree

Axes = int | list[int] | None
Index = Sequence[jax.Array | None]


def _add(x, y, alpha=1):
    return x + y if alpha == 1 else x + alpha * y


def _divide(x, y, rounding_mode: str | None = None):
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    return {"floor": jnp.floor, "trunc": jnp.trunc}[rounding_mode](x / y)


def _power(x, y):
    whole = isinstance(y, float) and y.is_integer()
    return jnp.power(x, int(y) if whole else y)


def _clamp(x, low=None, high=None):
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def _hardtanh(x, low=-1.0, high=1.0):
    bounded = lax.stop_gradient(jnp.clip(x, low, high))
    return jnp.where((x > low) & (x < high), x, bounded)


def _elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    below = jnp.where(x > 0, 0.0, x)  # the exponential of a large entry is infinite
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(below * input_scale))


def _gelu(x, approximate="none"):
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _axis(axes: Axes) -> int | tuple[int, ...] | None:
    """JAX's form of axes; no axis stands for all of them."""
    if axes is None or axes == []:
        return None
    return axes if isinstance(axes, int) else tuple(axes)


def _reduction(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def reduce(x, axes=None, keepdim=False):
        return function(x, axis=_axis(axes), keepdims=keepdim)

    return reduce


def _extreme(
    place: Callable[..., jax.Array], x, axis: int = -1, keepdim: bool = False
) -> PyTree:
    """The first largest (or smallest) entries along an axis, and their places."""
    places = place(x, axis=axis, keepdims=True)
    values = jnp.take_along_axis(x, places, axis=axis)
    return tuple(one if keepdim else one.squeeze(axis) for one in (values, places))


def _place(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def find(x, axis=None, keepdim=False):
        return function(x, axis=axis, keepdims=keepdim and axis is not None)

    return find


def _variance(x, axes=None, correction=1, keepdim=False):
    return jnp.var(x, axis=_axis(axes), ddof=correction, keepdims=keepdim)


def _variance_and_mean(x, axes=None, correction=1, keepdim=False):
    mean = jnp.mean(x, axis=_axis(axes), keepdims=keepdim)
    return _variance(x, axes, correction, keepdim), mean


def _vector_norm(x, order=2, axes=None, keepdim=False):
    options: Any = {"axis": _axis(axes), "keepdims": keepdim}
    if order != 2:
        size = jnp.abs(x)
        if order in (float("inf"), float("-inf")):
            return (jnp.max if order > 0 else jnp.min)(size, **options)
        return jnp.sum(size**order, **options) ** (1 / order)
    square = jnp.sum(x * x, **options)
    zero = square == 0  # where PyTorch's derivative is 0, and the root's infinite
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))


def _top(x, count, axis=-1, largest=True, in_order=True):
    del in_order
    moved = jnp.moveaxis(x, axis, -1)
    places = lax.top_k(moved if largest else -moved, count)[1]
    values = jnp.take_along_axis(moved, places, axis=-1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis)


def _sort(x, axis=-1, descending=False):
    places = jnp.argsort(x, axis=axis, descending=descending, stable=True)
    return jnp.take_along_axis(x, places, axis=axis), places


_OF_JAX = (
    *("abs", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "exp2"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "floor", "ceil", "round", "trunc"),
    *("sign", "isnan", "isinf", "reciprocal", "maximum", "minimum", "where"),
    *("logical_not", "logical_and", "logical_or", "logical_xor", "fmod", "remainder"),
    *("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"),
)
"""Operators that jax.numpy has under the same name, of the same arguments."""

_RENAMED = {
    "acos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
    "eq": "equal",
    "ge": "greater_equal",
    "gt": "greater",
    "le": "less_equal",
    "lt": "less",
    "mul": "multiply",
    "ne": "not_equal",
    "neg": "negative",
}
"""Those that it has under another name."""
_REDUCTIONS = {
    **{name: name for name in ("any", "max", "mean", "min", "prod", "sum")},
    "amax": "max",
    "amin": "min",
}

POINTWISE: dict[str, Callable[..., PyTree]] = {
    **{name: getattr(jnp, name) for name in _OF_JAX},
    **{name: getattr(jnp, other) for name, other in _RENAMED.items()},
    **{name: _reduction(getattr(jnp, own)) for name, own in _REDUCTIONS.items()},
    "add": _add,
    "argmax": _place(jnp.argmax),
    "argmin": _place(jnp.argmin),
    "clamp": _clamp,
    "cumsum": lambda x, axis: jnp.cumsum(x, axis=axis),
    "div": _divide,
    "elu": _elu,
    "erf": lax.erf,
    "gelu": _gelu,
    "hardtanh": _hardtanh,
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "linalg_vector_norm": _vector_norm,
    "_log_softmax": lambda x, axis, *_: jax.nn.log_softmax(x, axis=axis),
    "max.dim": partial(_extreme, jnp.argmax),
    "min.dim": partial(_extreme, jnp.argmin),
    "pow": _power,
    "relu": jax.nn.relu,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "_softmax": lambda x, axis, *_: jax.nn.softmax(x, axis=axis),
    "sort": _sort,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "topk": _top,
    "var": _variance,
    "var_mean": _variance_and_mean,
}
"""By the operator's name, with the overload where overloads differ."""


def _same(x, *_):
    return x


def _squeeze(x, axes=None):
    axes = range(x.ndim) if axes is None else [axes] if isinstance(axes, int) else axes
    return x.squeeze(tuple(axis for axis in axes if x.shape[axis] == 1))


def _expand(x, sizes, *_):
    own = (1,) * (len(sizes) - x.ndim) + x.shape
    wanted = [b if a == -1 else a for a, b in zip(sizes, own, strict=True)]
    return jnp.broadcast_to(x, wanted)


def _along(x, axis, entries) -> tuple:
    """The index that picks these entries along an axis."""
    return (slice(None),) * (axis % x.ndim) + (entries,)


def _slice(x, axis=0, start=None, end=None, step=1):
    return x[_along(x, axis, slice(start, end, step))]


def _select(x, axis, place):
    return x[_along(x, axis, place)]


def _split_with_sizes(x, sizes, axis=0):
    return jnp.split(x, list(accumulate(sizes[:-1])), axis=axis)


def _pad(x, sizes, value=0.0):
    """Padding is given from the last axis on, below and above; it may be negative."""
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))[::-1]
    edges = [(0, 0, 0)] * (x.ndim - len(pairs)) + [(*pair, 0) for pair in pairs]
    return lax.pad(x, jnp.asarray(value, x.dtype), edges)


def _index(indices: Index) -> tuple:
    return tuple(slice(None) if one is None else one for one in indices)


def _index_put(x, indices: Index, values, accumulate=False):
    here = x.at[_index(indices)]
    return here.add(values) if accumulate else here.set(values)


def _places(x, axis, index) -> tuple[jax.Array, ...]:
    """The index of all axes for one that says places along one axis alone."""
    grid = jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij", sparse=True)
    grid[axis % x.ndim] = index
    return tuple(grid)


def _part(source, index):
    """The entries of a source that an index has places for; a number stays."""
    if jnp.ndim(source) == 0:
        return source
    return source[tuple(slice(size) for size in index.shape)]


def _scatter(x, axis, index, source):
    return x.at[_places(x, axis, index)].set(_part(source, index))


def _scatter_add(x, axis, index, source):
    return x.at[_places(x, axis, index)].add(_part(source, index))


def _slice_scatter(x, source, axis=0, start=None, end=None, step=1):
    return x.at[_along(x, axis, slice(start, end, step))].set(source)


SHAPES: dict[str, Callable[..., PyTree]] = {
    **dict.fromkeys(("alias", "clone", "_to_copy"), _same),
    **dict.fromkeys(("lift_fresh_copy", "convert_element_type"), _same),
    **dict.fromkeys(("detach_", "stop_gradient"), lax.stop_gradient),
    "arange": jnp.arange,
    "cat": lambda xs, axis=0: jnp.concatenate(xs, axis=axis),
    "constant_pad_nd": _pad,
    "copy": lambda x, source, *_: jnp.broadcast_to(source, x.shape),
    "diagonal": lambda x, offset=0, one=0, two=1: jnp.diagonal(x, offset, one, two),
    "empty": lambda sizes, *_: jnp.zeros(sizes),
    "expand": _expand,
    "flip": lambda x, axes: jnp.flip(x, tuple(axes)),
    "full": lambda sizes, value, *_: jnp.full(sizes, value),
    "full_like": lambda x, value, *_: jnp.full_like(x, value),
    "gather": lambda x, axis, index, *_: x[_places(x, axis, index)],
    "index": lambda x, indices: x[_index(indices)],
    "index_put": _index_put,
    "index_select": lambda x, axis, index: jnp.take(x, index, axis=axis),
    "permute": lambda x, axes: jnp.transpose(x, [axis % x.ndim for axis in axes]),
    "repeat": lambda x, repeats: jnp.tile(x, repeats),
    "scalar_tensor": jnp.asarray,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "select": _select,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "split_with_sizes": _split_with_sizes,
    "squeeze": _squeeze,
    "sym_numel": jnp.size,
    "sym_size": jnp.size,
    "unsqueeze": jnp.expand_dims,
    "view": jnp.reshape,
}
"""By the operator's name."""

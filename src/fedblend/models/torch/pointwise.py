# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""ATen's operators on single entries, and its reductions, in JAX.

Where a function has a kink, the derivative there is PyTorch's: 0 for ReLU at 0, 1 for
``clamp`` at its bounds, the first of several largest entries for ``max`` along an axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedblend.core import PyTree

Axes = int | list[int] | None


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


def _leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, slope * x)


def _elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    below = jnp.where(x > 0, 0.0, x)  # the exponential of a large entry is infinite
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(below * input_scale))


def _gelu(x, approximate="none"):
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _softplus(x, beta=1.0, threshold=20.0):
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


def _softmax(x, axis, *_):
    return jax.nn.softmax(x, axis=axis)


def _log_softmax(x, axis, *_):
    return jax.nn.log_softmax(x, axis=axis)


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
    *("abs", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "square"),
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "floor", "ceil", "round", "trunc"),
    *("sign", "isnan", "isinf", "isfinite", "reciprocal", "exp2", "maximum"),
    *("minimum", "logical_not", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "fmod"),
)
"""Operators that jax.numpy has under the same name, of the same arguments."""

POINTWISE: dict[str, Callable[..., PyTree]] = {
    **{name: getattr(jnp, name) for name in _OF_JAX},
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "add": _add,
    "all": _reduction(jnp.all),
    "amax": _reduction(jnp.max),
    "amin": _reduction(jnp.min),
    "any": _reduction(jnp.any),
    "argmax": _place(jnp.argmax),
    "argmin": _place(jnp.argmin),
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atan2": jnp.arctan2,
    "atanh": jnp.arctanh,
    "clamp": _clamp,
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "clamp_min": _clamp,
    "cumsum": lambda x, axis: jnp.cumsum(x, axis=axis),
    "div": _divide,
    "elu": _elu,
    "eq": jnp.equal,
    "erf": lax.erf,
    "floor_divide": jnp.floor_divide,
    "ge": jnp.greater_equal,
    "gelu": _gelu,
    "gt": jnp.greater,
    "hardtanh": _hardtanh,
    "le": jnp.less_equal,
    "leaky_relu": _leaky_relu,
    "linalg_vector_norm": _vector_norm,
    "_log_softmax": _log_softmax,
    "log_sigmoid_forward": lambda x: (jax.nn.log_sigmoid(x), x),
    "logsumexp": _reduction(jax.nn.logsumexp),
    "lt": jnp.less,
    "max": _reduction(jnp.max),
    "max.dim": partial(_extreme, jnp.argmax),
    "max.other": jnp.maximum,
    "mean": _reduction(jnp.mean),
    "min": _reduction(jnp.min),
    "min.dim": partial(_extreme, jnp.argmin),
    "min.other": jnp.minimum,
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "neg": jnp.negative,
    "pow": _power,
    "prod": _reduction(jnp.prod),
    "relu": jax.nn.relu,
    "remainder": jnp.remainder,
    "rsqrt": lax.rsqrt,
    "rsub": lambda x, y, alpha=1: y - alpha * x,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "_softmax": _softmax,
    "softplus": _softplus,
    "sort": _sort,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "sum": _reduction(jnp.sum),
    "topk": _top,
    "var": _variance,
    "var_mean": _variance_and_mean,
    "where": jnp.where,
}
"""By the operator's name, with the overload where overloads differ."""

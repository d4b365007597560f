# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""ATen's operators that make, move and pick entries, in JAX."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax

from fedblend.core import PyTree

Index = Sequence[jax.Array | None]


def _same(x, *_):
    return x


def _squeeze(x, axes=None):
    axes = range(x.ndim) if axes is None else [axes] if isinstance(axes, int) else axes
    return x.squeeze(tuple(axis for axis in axes if x.shape[axis] == 1))


def _expand(x, sizes, *_):
    own = (1,) * (len(sizes) - x.ndim) + x.shape
    wanted = [b if a == -1 else a for a, b in zip(sizes, own, strict=True)]
    return jnp.broadcast_to(x, wanted)


def _permute(x, axes):
    return jnp.transpose(x, [axis % x.ndim for axis in axes])


def _along(x, axis, entries) -> tuple:
    """The index that picks these entries along an axis."""
    return (slice(None),) * (axis % x.ndim) + (entries,)


def _slice(x, axis=0, start=None, end=None, step=1):
    return x[_along(x, axis, slice(start, end, step))]


def _select(x, axis, place):
    return x[_along(x, axis, place)]


def _split(x, size, axis=0):
    return jnp.split(x, range(size, x.shape[axis], size), axis=axis)


def _split_with_sizes(x, sizes, axis=0):
    return jnp.split(x, list(accumulate(sizes[:-1])), axis=axis)


def _unbind(x, axis=0):
    return [_select(x, axis, place) for place in range(x.shape[axis])]


def _roll(x, shifts, axes=()):
    return jnp.roll(x, tuple(shifts), axis=tuple(axes) or None)


def _pad(x, sizes, value=0.0):
    """Padding is given from the last axis on, below and above; it may be negative."""
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))[::-1]
    edges = [(0, 0, 0)] * (x.ndim - len(pairs)) + [(*pair, 0) for pair in pairs]
    return lax.pad(x, jnp.asarray(value, x.dtype), edges)


def _arange(*limits):
    return jnp.arange(*limits)


def _full(sizes, value, *_):
    return jnp.full(sizes, value)


def _full_like(x, value, *_):
    return jnp.full_like(x, value)


def _at(indices: Index) -> tuple:
    return tuple(slice(None) if one is None else one for one in indices)


def _index(x, indices: Index):
    return x[_at(indices)]


def _index_put(x, indices: Index, values, accumulate=False):
    here = x.at[_at(indices)]
    return here.add(values) if accumulate else here.set(values)


def _places(x, axis, index) -> tuple[jax.Array, ...]:
    """The index of all axes for one that says places along one axis alone."""
    grid = jnp.meshgrid(*map(jnp.arange, index.shape), indexing="ij", sparse=True)
    grid[axis % x.ndim] = index
    return tuple(grid)


def _gather(x, axis, index, *_):
    return x[_places(x, axis, index)]


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


def _select_scatter(x, source, axis, place):
    return x.at[_along(x, axis, place)].set(source)


SHAPES: dict[str, Callable[..., PyTree]] = {
    **dict.fromkeys(("alias", "clone", "contiguous", "_to_copy", "to"), _same),
    **dict.fromkeys(("lift_fresh_copy", "convert_element_type"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), jnp.reshape),
    **dict.fromkeys(("detach", "detach_", "stop_gradient"), lax.stop_gradient),
    "arange": _arange,
    "cat": lambda xs, axis=0: jnp.concatenate(xs, axis=axis),
    "constant_pad_nd": _pad,
    "copy": lambda x, source, *_: jnp.broadcast_to(source, x.shape),
    "diagonal": lambda x, offset=0, one=0, two=1: jnp.diagonal(x, offset, one, two),
    "empty": lambda sizes, *_: jnp.zeros(sizes),
    "expand": _expand,
    "eye": jnp.eye,
    "flip": lambda x, axes: jnp.flip(x, tuple(axes)),
    "full": _full,
    "full_like": _full_like,
    "gather": _gather,
    "index": _index,
    "index_put": _index_put,
    "index_select": lambda x, axis, index: jnp.take(x, index, axis=axis),
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "ones": lambda sizes, *_: jnp.ones(sizes),
    "permute": _permute,
    "repeat": lambda x, repeats: jnp.tile(x, repeats),
    "roll": _roll,
    "scalar_tensor": jnp.asarray,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "select": _select,
    "select_scatter": _select_scatter,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "split": _split,
    "split_with_sizes": _split_with_sizes,
    "squeeze": _squeeze,
    "stack": lambda xs, axis=0: jnp.stack(xs, axis=axis),
    "sym_numel": jnp.size,
    "sym_size": jnp.size,
    "t": jnp.transpose,
    "transpose": jnp.swapaxes,
    "tril": jnp.tril,
    "triu": jnp.triu,
    "unbind": _unbind,
    "unsqueeze": jnp.expand_dims,
    "zeros": lambda sizes, *_: jnp.zeros(sizes),
}
"""By the operator's name."""

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Primitives that move entries: shapes, slices, lookups; as ONNX operators.

A size that depends on the number of rows is symbolic. Where one such size is left, ONNX
finds it by itself (-1); where a tensor is to become as long as the rows, it is computed
from them.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedblend_interop.onnx_graph import ExportError, OnnxGraph, Rule, Value


def ints(*values: Any) -> np.ndarray:
    """Whole numbers as ONNX takes axes, sizes and places."""
    return np.asarray(values, np.int64)


def is_known(size: Any) -> bool:
    """Whether a size does not depend on the number of rows."""
    return isinstance(size, int | np.integer)


def is_static(equation: Any) -> bool:
    """Whether no output of an equation depends on the number of rows."""
    shapes = [variable.aval.shape for variable in equation.outvars]
    return all(is_known(size) for shape in shapes for size in shape)


def reshape_to(graph: OnnxGraph, value: Value, shape: Sequence[Any]) -> Value:
    """A value in another shape, of which one size may be symbolic."""
    sizes = [int(size) if is_known(size) else -1 for size in shape]
    if sizes.count(-1) > 1:
        raise ExportError(f"onnx: a shape of several open sizes, {tuple(shape)}")
    return graph.add("Reshape", value, ints(*sizes))


def _reshape(graph, equation, inputs):
    return reshape_to(graph, inputs[0], equation.outvars[0].aval.shape)


def _broadcast(graph, equation, inputs):
    shape = equation.outvars[0].aval.shape
    places = equation.params["broadcast_dimensions"]
    given = equation.invars[0].aval.shape
    padded: list[Any] = [1] * len(shape)
    for size, place in zip(given, places, strict=True):
        padded[place] = size
    value = inputs[0]
    if len(given) != len(shape):
        value = reshape_to(graph, value, padded)
    if list(padded) == list(shape):
        return value
    parts = []
    for have, want in zip(padded, shape, strict=True):
        if is_known(want):
            parts.append(ints(want))
        else:  # 1 leaves a size that is there already
            parts.append(_size(graph, want) if is_known(have) else ints(1))
    return graph.add("Expand", value, graph.add("Concat", *parts, axis=0))


def _size(graph: OnnxGraph, size: Any) -> Value:
    """A symbolic size: the number of rows, or a multiple of it."""
    found = re.fullmatch(r"(?:(\d+)\*)?rows", str(size))
    if found is None:
        raise ExportError(f"onnx: a size of {size} is not a multiple of the rows")
    if found[1] is None:
        return graph.rows
    return graph.add("Mul", graph.rows, np.asarray([int(found[1])], np.int64))


def _transpose(graph, equation, inputs):
    order = list(equation.params["permutation"])
    return graph.add("Transpose", inputs[0], perm=order)


def _concatenate(graph, equation, inputs):
    return graph.add("Concat", *inputs, axis=equation.params["dimension"])


def _split(graph, equation, inputs):
    sizes = np.asarray(equation.params["sizes"], np.int64)
    axis = equation.params["axis"]
    found = graph.add("Split", inputs[0], sizes, outputs=len(sizes), axis=axis)
    return found if isinstance(found, list) else [found]


def _cut(
    graph: OnnxGraph,
    value: Value,
    starts: Sequence[Any],
    ends: Sequence[Any],
    sizes: Sequence[Any],
    steps: Sequence[int] | None = None,
) -> Value:
    """A part of a value; axes that are kept whole are left out."""
    steps = [1] * len(sizes) if steps is None else steps
    axes = [
        axis
        for axis in range(len(sizes))
        if not (starts[axis] == 0 and ends[axis] == sizes[axis] and steps[axis] == 1)
    ]
    if not axes:
        return value
    if not all(is_known(ends[axis]) for axis in axes):
        raise ExportError(
            "onnx: a model that selects some of the rows cannot be exported"
        )
    numbers = [[int(of[axis]) for axis in axes] for of in (starts, ends)]
    chosen = [*numbers, axes, [steps[axis] for axis in axes]]
    return graph.add("Slice", value, *(ints(*one) for one in chosen))


def _slice(graph, equation, inputs):
    params, sizes = equation.params, equation.invars[0].aval.shape
    first, last = params["start_indices"], params["limit_indices"]
    return _cut(graph, inputs[0], first, last, sizes, params["strides"])


def apart(
    graph: OnnxGraph,
    value: Value,
    shape: Sequence[Any],
    axis: int,
    gap: int,
    filled: Value | None = None,
) -> tuple[Value, Any]:
    """The entries of an axis ``gap`` places apart, and how long the axis is then.

    Between them is ``filled``, 0 if None.
    """
    size = shape[axis]
    if gap == 1:
        return value, size
    place = ints(axis + 1)
    edges = np.zeros(2 * (len(shape) + 1), np.int64)
    edges[len(shape) + 2 + axis] = gap - 1
    more = () if filled is None else (filled,)
    wide = graph.add("Pad", graph.add("Unsqueeze", value, place), edges, *more)
    # 0 keeps the size of an axis before.
    sizes = np.asarray([*[0] * axis, size * gap, *shape[axis + 1 :]], np.int64)
    length = (size - 1) * gap + 1
    cut = ([0], [length], [axis])
    flat = graph.add("Reshape", wide, sizes)
    parts = (ints(*one) for one in cut)
    return graph.add("Slice", flat, *parts), length


def _pad(graph, equation, inputs):
    config, (value, filled) = equation.params["padding_config"], inputs
    if any(low < 0 or high < 0 for low, high, _ in config):
        raise ExportError("onnx: negative padding cannot be exported")
    shape = list(equation.invars[0].aval.shape)
    for axis, (_, _, inner) in enumerate(config):
        value, shape[axis] = apart(graph, value, shape, axis, inner + 1, filled)
    edges = [low for low, _, _ in config] + [high for _, high, _ in config]
    if not any(edges):
        return value
    return graph.add("Pad", value, ints(*edges), filled)


def _gather(graph, equation, inputs):
    """A lookup in a table along one axis, or a slice at places that are known."""
    operand, places = inputs
    numbers, sizes = (
        equation.params["dimension_numbers"],
        equation.params["slice_sizes"],
    )
    shape, batch = equation.invars[0].aval.shape, equation.invars[1].aval.shape[:-1]
    axes = numbers.start_index_map
    if numbers.operand_batching_dims:
        return _along(graph, equation, inputs)
    if not isinstance(places, str) and not batch:
        starts: list[Any] = [0] * len(shape)
        for axis, start in zip(axes, places.tolist(), strict=True):
            most = shape[axis] - sizes[axis] if is_known(shape[axis]) else 0
            starts[axis] = min(max(int(start), 0), most)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        cut = _cut(graph, operand, starts, ends, shape)
        return reshape_to(graph, cut, equation.outvars[0].aval.shape)
    whole = [size for axis, size in enumerate(shape) if axis not in axes]
    taken = [size for axis, size in enumerate(sizes) if axis not in axes]
    axis = axes[0]
    adjacent = tuple(range(axis, axis + len(axes)))
    if numbers.collapsed_slice_dims != axes or axes != adjacent or whole != taken:
        raise ExportError(
            "onnx: a lookup along axes that are not neighbors cannot be exported"
        )
    if len(axes) > 1:  # one lookup along the axes as one
        if isinstance(places, str):
            raise ExportError("onnx: a lookup along several axes cannot be exported")
        wide = [shape[one] for one in axes]
        grid = np.ravel_multi_index(np.moveaxis(places, -1, 0), wide, mode="clip")
        places = np.asarray(grid, np.int64)[..., None]
        shape = (*shape[:axis], math.prod(wide), *shape[axis + len(axes) :])
        operand = reshape_to(graph, operand, shape)
    index = reshape_to(graph, places, batch)
    kind = np.int64 if len(axes) > 1 else equation.invars[1].aval.dtype
    top = np.asarray(shape[axis] - 1, kind)
    index = graph.add("Min", graph.add("Max", index, np.zeros((), kind)), top)
    found = graph.add("Gather", operand, index, axis=axis)
    # ONNX has the places where the axis was; JAX says where the other axes are.
    rank = len(batch) + len(whole)
    ahead = [place for place in range(rank) if place not in numbers.offset_dims]
    order = np.empty(rank, int)
    order[ahead] = axis + np.arange(len(batch))
    others = [*range(axis), *range(axis + len(batch), rank)]
    order[list(numbers.offset_dims)] = others
    if (order == np.arange(rank)).all():
        return found
    return graph.add("Transpose", found, perm=order.tolist())


def _along(graph, equation, inputs):
    """The entry of each row along one axis, as ``jnp.take_along_axis``."""
    numbers, (operand, places) = equation.params["dimension_numbers"], inputs
    shape, batch = equation.invars[0].aval.shape, equation.invars[1].aval.shape[:-1]
    others = tuple(at for at in range(len(shape)) if at not in numbers.start_index_map)
    usual = (
        numbers.start_indices_batching_dims == others == numbers.operand_batching_dims
    )
    if not usual or len(batch) != len(shape) or numbers.offset_dims:
        raise ExportError(
            "onnx: a lookup in another table for each row cannot be exported"
        )
    index = reshape_to(graph, places, batch)
    return graph.add("GatherElements", operand, index, axis=numbers.start_index_map[0])


def _scatter(graph, equation, inputs):
    """Entries at one known place of an axis are replaced."""
    operand, place, update = inputs
    numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
    axes = numbers.scatter_dims_to_operand_dims
    simple = len(axes) == 1 and numbers.inserted_window_dims == axes
    if isinstance(place, str) or place.size != 1 or not simple:
        raise ExportError("onnx: setting entries at these places cannot be exported")
    (axis,) = axes
    mask = np.arange(shape[axis]) == int(place.reshape(()))
    mask = mask.reshape([-1 if at == axis else 1 for at in range(len(shape))])
    wide = [1 if at == axis else size for at, size in enumerate(shape)]
    return graph.add("Where", mask, reshape_to(graph, update, wide), operand)


def _stack(graph, equation, inputs):
    axis = equation.params["axis"]
    place = ints(axis)
    apart = [graph.add("Unsqueeze", value, place) for value in inputs]
    return graph.add("Concat", *apart, axis=axis)


def _reverse(graph, equation, inputs):
    axes = list(equation.params["dimensions"])
    count, far = len(axes), np.iinfo(np.int64).min
    ends = [-1] * count, [far] * count, axes, [-1] * count
    return graph.add("Slice", inputs[0], *(ints(*one) for one in ends))


def _tile(graph, equation, inputs):
    times = [
        ints(count) if is_known(count) else _size(graph, count)
        for count in equation.params["reps"]
    ]
    return graph.add("Tile", inputs[0], graph.add("Concat", *times, axis=0))


SHAPES: dict[str, Rule] = {
    "stack": _stack,
    "rev": _reverse,
    "tile": _tile,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "concatenate": _concatenate,
    "split": _split,
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
    "scatter": _scatter,
}

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Computing a model with weights whose change is not added to them.

``evaluate`` goes through the program of a model (its jaxpr) as JAX does, but some of
the values are a ``Weight``: an array W, and the parts of its change. Where W meets the
data in a linear operation, the change is applied to the data instead::

    x W^T  -->  x W^T + scale (x A^T) B^T

so that under ``vmap`` over clients, which differ in A and B only, ``x W^T`` stays one
matrix product of all clients' rows. This holds for matrix products, convolutions and
lookups in a table; inside functions that are compiled, rematerialized, or scanned, with
a weight for all turns of the scan or one for each. W may be transposed, cast, sliced or
split before. Any other operation, and functions with a derivative of their own, get the
sum.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from fedblend.models.parts import scan_inputs
from fedblend_adapters.weight import (
    RANK,
    Label,
    Labeled,
    Meeting,
    Weight,
    contract,
    drop_label,
    plain,
)

_DATA = 1000
"""Labels of the data's own axes start here."""


def evaluate(program: Any, constants: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The outputs of a program, whose arguments may be weights; so may its outputs.

    Args:
        program: a jaxpr.
        constants: those of the program.
        given: its arguments.
    """
    known = dict(zip(program.constvars, constants, strict=True))
    known |= dict(zip(program.invars, given, strict=True))

    def read(one):
        return one.val if isinstance(one, Literal) else known[one]

    for step in program.eqns:
        values = [read(one) for one in step.invars]
        if any(isinstance(one, Weight) for one in values):
            found = _follow(program, step, values)
        else:
            found = _compute(program, step, values)
        known |= dict(zip(step.outvars, found, strict=True))
    return [read(one) for one in program.outvars]


def _follow(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of a step that takes a weight."""
    name, found = step.primitive.name, None
    if name in MOVES and isinstance(values[0], Weight):
        found = MOVES[name](step, values)
    if found is None:
        found = _RULES.get(name, _compute_sums)(program, step, values)
    return found


def _compute(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of one step of a program, as JAX computes them."""
    names = {
        one: value
        for one, value in zip(step.invars, values, strict=True)
        if not isinstance(one, Literal)
    }
    only = program.replace(
        constvars=[],
        invars=[*names],
        outvars=step.outvars,
        eqns=[step],
        debug_info=program.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(only, ()))(*names.values())


def _compute_sums(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    name = step.primitive.name
    return _compute(program, step, [plain(one, name) for one in values])


def _product(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    if all(isinstance(one, Weight) for one in values):
        return _compute_sums(program, step, values)
    side = 0 if isinstance(values[0], Weight) else 1
    weight, data = values[side].floating(), values[1 - side]
    both = weight.base.labels
    summed, batched = step.params["dimension_numbers"]
    names = {
        theirs: both[ours]
        for pairs in (summed, batched)
        for ours, theirs in zip(pairs[side], pairs[1 - side], strict=True)
    }
    data = Labeled(data, tuple(names.get(at, _DATA + at) for at in range(data.ndim)))
    over = [both[at] for at in summed[side]]
    common = [both[at] for at in batched[side]]
    sides = [data.labels, both] if side else [both, data.labels]
    free = [one for of in sides for one in of if one not in (*over, *common)]
    precision = step.params["precision"]

    def linear(factor: Labeled) -> Labeled:
        others = (*data.labels, *_new(factor.labels, data.labels))
        factor = Labeled(factor.array.astype(data.array.dtype), factor.labels)
        kept = [one for one in others if one not in over]
        return contract(data, factor, kept, precision=precision)

    given = [weight.base.array, data.array]
    [out] = _compute(program, step, given[::-1] if side else given)
    out = Labeled(out, (*common, *free))
    at = Meeting("dot_general", frozenset(over), frozenset(common), linear, out)
    return _apply_change(program, step, values, weight, at)


def _new(labels: Sequence[Label], known: Sequence[Label]) -> tuple[Label, ...]:
    return tuple(one for one in labels if one not in known)


def _convolution(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    data, kernel = values
    grouped = step.params["feature_group_count"] * step.params["batch_group_count"] > 1
    if grouped or isinstance(data, Weight):
        return _compute_sums(program, step, values)
    weight = kernel.floating()
    axes = step.params["dimension_numbers"]
    outward = weight.base.labels[axes.rhs_spec[0]]
    over = drop_label(weight.base.labels, outward)

    def labels(feature: Label) -> list[Label]:
        found = [_DATA + at for at in range(data.ndim)]
        found[axes.out_spec[1]] = feature
        return found

    def linear(factor: Labeled) -> Labeled:
        order = [RANK if one == outward else one for one in weight.base.labels]
        own = factor.align(order).astype(data.dtype)
        return Labeled(step.primitive.bind(data, own, **step.params), (*labels(RANK),))

    [out] = _compute(program, step, [data, weight.base.array])
    out = Labeled(out, (*labels(outward),))
    at = Meeting(step.primitive.name, frozenset(over), frozenset(), linear, out)
    return _apply_change(program, step, values, weight, at)


def _lookup(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    table, places = values
    axes, shape = step.params["dimension_numbers"], table.base.array.shape
    whole_rows = (
        len(shape) == 2
        and axes.collapsed_slice_dims == axes.start_index_map == (0,)
        and step.params["slice_sizes"] == (1, shape[1])
    )
    if not whole_rows or isinstance(places, Weight):
        return _compute_sums(program, step, values)
    weight = table.floating()
    row, column = weight.base.labels

    def labels(feature: Label) -> list[Label]:
        found = [_DATA + at for at in range(places.ndim)]
        found[axes.offset_dims[0]] = feature
        return found

    def linear(factor: Labeled) -> Labeled:
        own = factor.align((row, RANK)).astype(weight.base.array.dtype)
        options = step.params | {"slice_sizes": (1, own.shape[1])}
        looked_up = step.primitive.bind(own, places, **options)
        return Labeled(looked_up, (*labels(RANK),))

    [out] = _compute(program, step, [weight.base.array, places])
    out = Labeled(out, (*labels(column),))
    at = Meeting("gather", frozenset([row]), frozenset(), linear, out)
    return _apply_change(program, step, values, weight, at)


def _apply_change(
    program: Any, step: Any, values: Sequence[Any], weight: Weight, at: Meeting
) -> list[Any]:
    """The output of a linear step with the change, or the step with the sum."""
    if weight.kind is None:
        return [at.out.array]
    found = weight.kind.change(weight, at)
    return _compute_sums(program, step, values) if found is None else [found]


def _elementwise(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    weight = values[0].floating()
    [array] = _compute(program, step, [weight.base.array])
    return [dataclasses.replace(weight, base=Labeled(array, weight.base.labels))]


def _call(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    inner = step.params["jaxpr"]
    return evaluate(inner.jaxpr, inner.consts, values)


def _rematerialize(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    of = step.params

    def compute(*values):
        return [plain(one) for one in evaluate(of["jaxpr"], (), values)]

    again = jax.checkpoint(compute, prevent_cse=of["prevent_cse"], policy=of["policy"])
    return again(*values)


def _scan(program: Any, step: Any, values: Sequence[Any]) -> list[Any]:
    of = step.params
    same, carried = scan_inputs(of)
    ends = same, same + carried
    constants, carry = values[: ends[0]], [plain(one) for one in values[slice(*ends)]]
    scanned = [
        (one.rows() or plain(one, "scan")) if isinstance(one, Weight) else one
        for one in values[ends[1] :]
    ]

    def turn(carry, rows):
        own = [one.row() if isinstance(one, Weight) else one for one in rows]
        inner = of["jaxpr"]
        found = evaluate(inner.jaxpr, inner.consts, [*constants, *carry, *own])
        found = [plain(one) for one in found]
        return found[:carried], found[carried:]

    carry, collected = jax.lax.scan(
        turn,
        carry,
        scanned,
        length=of["length"],
        reverse=of["reverse"],
        unroll=of["unroll"],
    )
    return [*carry, *collected]


def _transpose(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight = values[0].floating()
    labels = [weight.base.labels[at] for at in step.params["permutation"]]
    base = Labeled(weight.base.align(labels), tuple(labels))
    return [dataclasses.replace(weight, base=base)]


def _reshape(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight = values[0].floating()
    old, new = weight.base.array.shape, step.params["new_sizes"]
    labels = weight.base.labels
    for these, those in _groups(old, new):
        own = tuple(labels[at] for at in these)
        if len(these) == len(those) == 1:
            continue
        if not these:
            return None
        made = [(own, place, len(those)) for place in range(len(those))]
        found = weight.reshape(own, made, [new[at] for at in those])
        if found is None:
            return None
        weight = found
    return [weight]


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list, list]]:
    """Which axes of a shape become which of another one with as many entries."""
    shapes, at, found = (old, new), [0, 0], []

    def following(side):
        """The next axis of this side; 0 if there is none."""
        return shapes[side][at[side]] if at[side] < len(shapes[side]) else 0

    while following(0) or following(1):
        group, sizes = ([], []), [1, 1]
        sides = [side for side in (0, 1) if following(side)]
        while sides:
            for side in sides:
                group[side].append(at[side])
                sizes[side] *= following(side)
                at[side] += 1
            ones = [following(side) == 1 for side in (0, 1)]
            sides = [int(sizes[0] > sizes[1])]
            if sizes[0] == sizes[1]:  # an axis of length 1 goes with those before it
                sides = [ones.index(True)] if ones[0] != ones[1] else []
        found.append(group)
    return found


def _squeeze(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight = values[0].floating()
    for label in [weight.base.labels[at] for at in step.params["dimensions"]]:
        weight = weight.move(label, jnp.squeeze)
    return [weight]


def _slice(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight, of = values[0].floating(), step.params
    ends = zip(
        weight.base.labels,
        of["start_indices"],
        of["limit_indices"],
        of["strides"] or [1] * len(weight.base.labels),
        strict=True,
    )
    for label, *range_ in ends:
        weight = weight.move(label, partial(_cut, *range_))
    return [weight]


def _cut(start, limit, stride, array, axis):
    return jax.lax.slice_in_dim(array, start, limit, stride, axis)


def _dynamic_slice(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight, *starts = values[0].floating(), *values[1:]
    ends = zip(weight.base.labels, starts, step.params["slice_sizes"], strict=True)
    for label, start, size in ends:
        weight = weight.move(
            label,
            lambda array, axis, start=start, size=size: jax.lax.dynamic_slice_in_dim(
                array, start, size, axis
            ),
        )
    return [weight]


def _split(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight = values[0].floating()
    label, found, start = weight.base.labels[step.params["axis"]], [], 0
    for size in step.params["sizes"]:
        found.append(weight.move(label, partial(_cut, start, start + size, 1)))
        start += size
    return found


MOVES: dict[str, Callable[..., list[Weight] | None]] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
}
"""Operations that only move the entries of a weight, on the weight and its change.

Each takes a step of a program and its arguments, the weight first, and returns the
weights that come of it; None where the change cannot follow.
"""
_RULES: dict[str, Callable[..., list[Any]]] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _lookup,
    "convert_element_type": _elementwise,
    "copy": _elementwise,
    "jit": _call,
    "pjit": _call,
    "remat2": _rematerialize,
    "checkpoint": _rematerialize,
    "scan": _scan,
}
"""What a step does with a weight, by its name."""

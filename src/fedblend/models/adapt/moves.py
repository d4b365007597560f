# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Operations that only move the entries of a weight, on the weight and its change.

Each takes a step of a program and its arguments, the weight first, and returns the
weights that come of it; None where the change cannot follow.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedblend.models.adapt.weight import Labeled, Weight

Move = Callable[[Any, Sequence[Any]], list[Weight] | None]


def _transpose(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight = values[0].floating()
    labels = [weight.base.labels[at] for at in step.params["permutation"]]
    base = Labeled(weight.base.to(labels), tuple(labels))
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
        found = weight.reshaped(own, made, [new[at] for at in those])
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
        weight = weight.moved(label, jnp.squeeze)
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
        weight = weight.moved(label, partial(_sliced, *range_))
    return [weight]


def _sliced(start, limit, stride, array, axis):
    return jax.lax.slice_in_dim(array, start, limit, stride, axis)


def _dynamic_slice(step: Any, values: Sequence[Any]) -> list[Weight] | None:
    weight, *starts = values[0].floating(), *values[1:]
    ends = zip(weight.base.labels, starts, step.params["slice_sizes"], strict=True)
    for label, start, size in ends:
        weight = weight.moved(
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
        found.append(weight.moved(label, partial(_sliced, start, start + size, 1)))
        start += size
    return found


MOVES: dict[str, Move] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
}
"""These operations, by name."""

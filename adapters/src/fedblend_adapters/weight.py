# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays whose axes have labels, and weights with a change that is not added to them.

A label is an axis of the whole weight, or one that a reshape made of such: so the parts
of a change need not know what was done to the weight on its way to the data.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedblend.core import STATIC

Label = Any
"""A number; a tuple (labels, place, number) for one of the axes made of others."""
RANK = -1
"""The label of the axis that the factors of a product have in common."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Labeled:
    """An array, and a label for each axis: the axis of the weight that it is."""

    array: jax.Array
    labels: tuple[Label, ...] = dataclasses.field(metadata=STATIC)

    def align(self, labels: Sequence[Label]) -> jax.Array:
        """The array with axes in this order, of length 1 where it has none."""
        order = [self.labels.index(one) for one in labels if one in self.labels]
        array = jnp.transpose(self.array, order)
        return jnp.expand_dims(
            array, [at for at, one in enumerate(labels) if one not in self.labels]
        )

    def along(self, label: Label, move: Callable[[jax.Array, int], jax.Array]):
        """The same with the axis of this label moved, where it has that axis."""
        if label not in self.labels:
            return self
        array = move(self.array, self.labels.index(label))
        kept = array.ndim == self.array.ndim
        return Labeled(array, self.labels if kept else drop_label(self.labels, label))

    def reshape(
        self, old: Sequence[Label], new: Sequence[Label], shape: Sequence[int]
    ) -> "Labeled | None":
        """The same with new axes of this shape in place of old ones, which it may lack.

        None if it has only some of them.
        """
        if not {*old} & {*self.labels}:
            return self
        if not {*old} <= {*self.labels}:
            return None
        start = self.labels.index(old[0])
        before = [one for one in self.labels[:start] if one not in old]
        after = [one for one in self.labels[start:] if one not in old]
        array = self.align([*before, *old, *after])
        place = len(before)
        kept = array.shape[:place], array.shape[place + len(old) :]
        array = array.reshape(*kept[0], *shape, *kept[1])
        return Labeled(array, (*before, *new, *after))


def contract(
    left: Labeled, right: Labeled, labels: Sequence[Label], **options: Any
) -> Labeled:
    """The sum of products over all labels that the result does not have."""
    number = {
        one: place for place, one in enumerate({*left.labels, *right.labels, *labels})
    }
    array = jnp.einsum(
        left.array,
        [number[one] for one in left.labels],
        right.array,
        [number[one] for one in right.labels],
        [number[one] for one in labels],
        **options,
    )
    return Labeled(array, tuple(labels))


class Meeting(NamedTuple):
    """A linear operation in which a weight meets the data.

    It sums ``over`` these axes of the weight, and is done apart for each place of the
    ``common`` ones. ``linear`` is the operation with another array in place of the
    weight, and ``out`` its output with the base alone.
    """

    operation: str
    over: frozenset[Label]
    common: frozenset[Label]
    linear: Callable[[Labeled], Labeled]
    out: Labeled


class Kind(Protocol):
    """What the parts of a change mean."""

    def change(self, weight: "Weight", at: Meeting) -> jax.Array | None:
        """The output of an operation with the change; None if that needs the sum."""
        ...

    def merge(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """The sum of base and change, for this operation."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of the base, and the parts of its change.

    ``kind`` says what the parts mean, see ``adapt``; None if there is no change.
    ``steps`` are those of the entries, where these are whole numbers of 8 bits.
    """

    base: Labeled
    parts: dict[str, Labeled]
    kind: Kind | None = dataclasses.field(metadata=STATIC)
    steps: Labeled | None = None

    def move(self, label: Label, move: Callable[[jax.Array, int], jax.Array]):
        """The weight with one axis sliced, or left out."""
        return jax.tree.map(
            lambda one: one.along(label, move), self, is_leaf=_is_labeled
        )

    def reshape(
        self, old: Sequence[Label], new: Sequence[Label], shape: Sequence[int]
    ) -> "Weight | None":
        """The weight with new axes in place of old ones; None if its change cannot."""
        base = self.base.reshape(old, new, shape)
        parts = {name: one.reshape(old, new, shape) for name, one in self.parts.items()}
        if base is None or None in parts.values():
            return None
        return dataclasses.replace(self, base=base, parts=parts)

    def floating(self) -> "Weight":
        """The weight with entries that are numbers to compute with."""
        if self.steps is None:
            return self
        entries = self.base.array.astype(self.steps.array.dtype)
        whole = entries * self.steps.align(self.base.labels)
        return Weight(Labeled(whole, self.base.labels), self.parts, self.kind)

    def merge(self, operation: str) -> jax.Array:
        """The sum of base and change, for this operation."""
        own = self.floating()
        if own.kind is None:
            return own.base.array
        return own.kind.merge(own.base, own.parts, operation)

    def rows(self) -> "Weight | None":
        """The weight, to be scanned over its first axis; None if the change cannot."""
        first = self.base.labels[0]
        if not all(first in one.labels for one in self.parts.values()):
            return None
        return jax.tree.map(
            lambda one: Labeled(
                one.align((first, *drop_label(one.labels, first))),
                (first, *drop_label(one.labels, first)),
            ),
            self,
            is_leaf=_is_labeled,
        )

    def row(self) -> "Weight":
        """One of ``rows``, whose arrays were sliced."""
        return jax.tree.map(
            lambda one: Labeled(one.array, one.labels[1:]), self, is_leaf=_is_labeled
        )


def axes_of(label: Label) -> set[int]:
    """The axes of the whole weight that a label is made of."""
    if not isinstance(label, tuple):
        return {label}
    return {axis for one in label[0] for axis in axes_of(one)}


def _is_labeled(node: Any) -> bool:
    return isinstance(node, Labeled)


def drop_label(labels: Sequence[Label], label: Label) -> tuple[Label, ...]:
    """The labels but this one."""
    return tuple(one for one in labels if one != label)


def plain(value: Any, operation: str = "") -> Any:
    """A value as an array, for this operation."""
    return value.merge(operation) if isinstance(value, Weight) else value

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How the weights of a model meet its data: which axes are summed over, and which not.

``evaluate`` computes the model, with shapes alone, and asks for the change of each
weight: the answer is noted, and there is no change.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from fedblend.core import PyTree
from fedblend.models.model import Model
from fedblend.models.parts import layer_of, operations_of
from fedblend.trees import leaves_by_path
from fedblend_adapters.evaluate import evaluate
from fedblend_adapters.weight import (
    Label,
    Labeled,
    Meeting,
    Weight,
    axes_of,
    plain,
)

LINEAR = ("dot_general", "conv_general_dilated", "gather")
"""The operations that a change of low rank goes through."""


@dataclasses.dataclass(frozen=True)
class WeightUse:
    """Where a weight first meets the data.

    ``inward`` are the axes that are summed over there, ``outward`` those that the
    output has, ``stack`` those over which the model scans, or maps.
    """

    shape: tuple[int, ...]
    dtype: Any
    operation: str = ""
    stack: tuple[int, ...] = ()
    inward: tuple[int, ...] = ()
    outward: tuple[int, ...] = ()
    is_head: bool = False
    is_bias: bool = False

    def sizes(self, *axes: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths of axes."""
        return tuple(self.shape[axis] for several in axes for axis in several)

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @property
    def adapter_dtype(self) -> Any:
        """Of parameters that change this weight: at least float32."""
        return jnp.promote_types(self.dtype, jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Note:
    """A kind of change that changes nothing, and notes the first use of a weight."""

    path: str
    use: WeightUse
    uses: dict[str, WeightUse]
    products: list[str]

    def change(self, weight: Weight, at: Meeting) -> jax.Array:
        over = _axes(at.over)
        free = _axes({*weight.base.labels} - at.over - at.common)
        axes = range(len(self.use.shape))
        # An axis of length 1 may get lost on the way, it is summed over as well.
        over |= {axis for axis in axes if self.use.shape[axis] == 1} - free
        # An axis that is split, and summed over in part, is neither.
        found = dataclasses.replace(
            self.use,
            operation=at.operation if not over & free else "",
            inward=tuple(axis for axis in axes if axis in over),
            outward=tuple(axis for axis in axes if axis in free),
            stack=tuple(axis for axis in axes if axis not in over | free),
        )
        self.uses.setdefault(self.path, found)
        if at.operation != "gather":
            self.products.append(self.path)
        return at.out.array

    def merge(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        found = dataclasses.replace(self.use, operation=operation)
        self.uses.setdefault(self.path, found)
        return base.array


def _axes(labels: Iterable[Label]) -> set[int]:
    return {axis for label in labels for axis in axes_of(label)}


def uses_of(model: Model, base: PyTree, inputs: PyTree) -> dict[str, WeightUse]:
    """How each floating weight of a model meets the data, by path, in that order.

    Weights that never do come last.

    Args:
        model: any.
        base: its parameters, or their shapes.
        inputs: some rows, or their shapes.
    """
    program = jax.make_jaxpr(model.apply)(base, inputs)
    uses: dict[str, WeightUse] = {}
    products: list[str] = []
    unused = {
        path: WeightUse(leaf.shape, leaf.dtype)
        for path, leaf in leaves_by_path(base).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }

    def note(base, inputs):
        weights = [
            Weight(
                Labeled(leaf, tuple(range(leaf.ndim))),
                {},
                _Note(path, unused[path], uses, products),
            )
            if path in unused
            else leaf
            for path, leaf in leaves_by_path(base).items()
        ]
        given = [*weights, *jax.tree.leaves(inputs)]
        found = evaluate(program.jaxpr, program.consts, given)
        return [plain(one) for one in found]

    jax.eval_shape(note, base, inputs)
    last = products[-1] if products else ""
    operations = operations_of(model, base, inputs)
    for path, use in uses.items():
        same_layer = layer_of(path) == layer_of(last) != ""
        uses[path] = dataclasses.replace(
            use,
            is_head=path == last or same_layer,
            is_bias=operations[path] == "add",
        )
    return uses | {path: use for path, use in unused.items() if path not in uses}

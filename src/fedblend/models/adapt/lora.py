# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""LoRA: the change of a weight is a product of low rank.

For a weight W [out, in] that multiplies rows x, with A [rank, in] and B [out, rank]::

    x W^T  -->  x W^T + (alpha / rank) (x A^T) B^T

A starts like a layer of its own, B at zero, so that the model starts as its base. "in"
are the axes of W over which it is multiplied with the data, whatever W's layout; a
weight of more axes has factors of more axes. For layers that are stacked on further
axes, and scanned, so are their factors: the rank is the first axis of A and the last of
B in any case.

E. J. Hu et al., LoRA: Low-rank adaptation of large language models, ICLR 2022. With
``train="b"`` A stays what it is: Y. Sun et al., Improving LoRA in privacy-preserving
federated learning (FFA-LoRA), ICLR 2024.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import COUNT, POSITIVE, WHOLE, gate, optional, words
from fedblend.core import Key
from fedblend.models.adapt.uses import LINEAR, Use
from fedblend.models.adapt.weight import RANK, Labeled, Meeting, Weight, contract

Trained = Literal["both", "b"]
"""Which factors are trained."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """What ``lora`` returns."""

    rank: int
    scale: float
    train: Trained
    seed: int

    def takes(self, use: Use) -> bool:
        """Whether a weight with this use can have such a change."""
        return use.operation in LINEAR and bool(use.inward) and bool(use.outward)

    def usual(self, use: Use) -> bool:
        """Whether it has one where the user does not say which weights have."""
        return self.takes(use) and use.operation != "gather" and not use.is_head

    def init(self, key: Key, path: str, use: Use) -> dict[str, jax.Array]:
        """The parameters of the change of one weight."""
        outward = use.sizes(use.stack, use.outward)
        found = {"b": jnp.zeros((*outward, self.rank), use.adapter_dtype)}
        if self.train == "both":
            found["a"] = self._first(keys.named(key, path), use)
        return found

    def _first(self, key: Key, use: Use) -> jax.Array:
        # PyTorch's start of a layer, kaiming_uniform_ with a = sqrt(5). A row of a
        # table is looked up alone, as if it were multiplied with a single one.
        entries = 1 if use.operation == "gather" else math.prod(use.sizes(use.inward))
        bound = 1 / math.sqrt(entries)
        shape = (self.rank, *use.sizes(use.stack, use.inward))
        return jax.random.uniform(key, shape, use.adapter_dtype, -bound, bound)

    def fixed(self, path: str, use: Use) -> dict[str, jax.Array]:
        """What belongs to the change and is no parameter."""
        if self.train == "both":
            return {}
        key = keys.named(jax.random.key(self.seed), "lora")
        return {"a": self._first(keys.named(key, path), use)}

    def parts(self, params: dict[str, jax.Array], use: Use) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        return {
            "a": Labeled(params["a"], (RANK, *use.stack, *use.inward)),
            "b": Labeled(params["b"], (*use.stack, *use.outward, RANK)),
        }

    def changed(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """The output of an operation with the change; None if that needs the sum."""
        a, b = weight.parts["a"], weight.parts["b"]
        if at.over == {*a.labels} - {*b.labels}:
            first, second = a, b
        elif at.over == {*b.labels} - {*a.labels}:
            first, second = b, a
        else:
            return None
        middle = at.linear(first)
        middle = Labeled(self.scale * middle.array, middle.labels)
        second = Labeled(second.array.astype(middle.array.dtype), second.labels)
        change = contract(middle, second, at.out.labels).array
        return at.out.array + change.astype(at.out.array.dtype)

    def merged(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """The sum of base and change."""
        change = self.scale * contract(parts["a"], parts["b"], base.labels).array
        return (base.array + change).astype(base.array.dtype)


@gate(rank=COUNT, alpha=optional(POSITIVE), train=words("both", "b"), seed=WHOLE)
def lora(
    rank: int = 8,
    *,
    alpha: float | None = None,
    train: Trained = "both",
    seed: int = 0,
) -> Lora:
    """A change of low rank of weights that multiply the data, for ``adapt``.

    Args:
        rank: of the change of each weight.
        alpha: the change is scaled by ``alpha / rank``; by 1 if None.
        train: "b" keeps A as it starts: clients' changes then sum up exactly, since
            the mean of products with the same A is the product with the mean.
        seed: of that A, which all clients have.

    Example:
        >>> lora(4, alpha=8).scale
        2.0
    """
    return Lora(rank, 1.0 if alpha is None else float(alpha) / rank, train, seed)

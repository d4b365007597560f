# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two changes of low rank of the same weight, weighed by the input: a small mixture.

For a weight W [out, in] that multiplies rows x, with two pairs of factors and a gate G
[2, in]::

    w = softmax(x G^T)
    x W^T  -->  x W^T + w_0 scale (x A_p^T) B_p^T + w_1 scale (x A_s^T) B_s^T

The gate starts at zero, equal weights. The weights differ from row to row, and from
place to place of a sequence: there is no matrix that W plus the change would be.

Reference:
    Bian, Wang, Zhang, Xu. FedALT: Federated fine-tuning through adaptive local training
    with rest-of-world LoRA. AAAI 2026, arXiv:2503.11880.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import COUNT, POSITIVE, gate, optional
from fedblend.core import Key, PyTree
from fedblend.errors import SettingError
from fedblend.models.adapt.lora import Lora, lora
from fedblend.models.adapt.uses import Use
from fedblend.models.adapt.weight import RANK, Labeled, Meeting, Weight, contract

PAIR = ("personal", "shared")


@dataclasses.dataclass(frozen=True)
class GatedLora:
    """What ``gated_lora`` returns."""

    each: Lora

    def takes(self, use: Use) -> bool:
        """Whether a weight with this use can have such a change."""
        return self.each.takes(use)

    def usual(self, use: Use) -> bool:
        """Whether it has one where the user does not say which weights have."""
        return self.each.usual(use)

    def init(self, key: Key, path: str, use: Use) -> dict[str, PyTree]:
        """The parameters of the change of one weight."""
        shape = (len(PAIR), *use.sizes(use.stack, use.inward))
        both = {name: self.each.init(keys.named(key, name), path, use) for name in PAIR}
        return {**both, "gate": jnp.zeros(shape, use.adapter_dtype)}

    def fixed(self, path: str, use: Use) -> dict[str, jax.Array]:
        """What belongs to the change and is no parameter."""
        del path, use
        return {}

    def parts(self, params: dict[str, PyTree], use: Use) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        found = {
            f"{name} {factor}": part
            for name in PAIR
            for factor, part in self.each.parts(params[name], use).items()
        }
        gate = Labeled(params["gate"], (RANK, *use.stack, *use.inward))
        return {**found, "gate": gate}

    def changed(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """The output of an operation with the change; None if that needs the sum."""
        parts = weight.parts
        a, b = parts["personal a"], parts["personal b"]
        if at.over != {*a.labels} - {*b.labels}:
            return None
        scores = at.linear(parts["gate"])
        axis = scores.labels.index(RANK)
        wide = jnp.promote_types(scores.array.dtype, jnp.float32)
        weights = jax.nn.softmax(scores.array.astype(wide), axis=axis)
        out = at.out.array
        for place, name in enumerate(PAIR):
            middle = at.linear(parts[f"{name} a"])
            own = jax.lax.slice_in_dim(weights, place, place + 1, axis=axis)
            scaled = self.each.scale * own.astype(middle.array.dtype) * middle.array
            last = parts[f"{name} b"]
            last = Labeled(last.array.astype(scaled.dtype), last.labels)
            change = contract(Labeled(scaled, middle.labels), last, at.out.labels)
            out = out + change.array.astype(out.dtype)
        return out

    def merged(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """There is no sum: one line on what to leave out."""
        shape = list(base.array.shape)
        raise SettingError(
            "adapt: where",
            f"a weight {shape} is used in {operation!r}, which a change that depends "
            "on the input does not go through: leave it out",
        )


@gate(rank=COUNT, alpha=optional(POSITIVE))
def gated_lora(rank: int = 8, *, alpha: float | None = None) -> GatedLora:
    """Two changes of low rank, weighed by the input, for ``adapt``.

    Parameters of each weight are ``{"personal": {"a", "b"}, "shared": {"a", "b"},
    "gate"}``: ``fedalt_lora`` trains the first and the gate, and keeps the mean of
    other clients' in the second.

    Args:
        rank: of each change of each weight.
        alpha: changes are scaled by ``alpha / rank``; by 1 if None.

    Example:
        >>> gated_lora(4, alpha=8).each.scale
        2.0
    """
    return GatedLora(lora(rank, alpha=alpha))

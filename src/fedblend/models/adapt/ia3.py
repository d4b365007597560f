# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""(IA)^3: what a weight gives is scaled, channel by channel.

For a weight W [out, in] that multiplies rows x, with a vector v [out]::

    x W^T  -->  (1 + v) * (x W^T)

v starts at zero, so that the model starts as its base. The paper's vector is 1 + v, and
scales keys, values and the inner activations of a transformer: ``where`` names their
weights.

H. Liu et al., Few-shot parameter-efficient fine-tuning is better and cheaper than
in-context learning, NeurIPS 2022.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedblend.core import Key
from fedblend.models.adapt.uses import LINEAR, Use
from fedblend.models.adapt.weight import Labeled, Meeting, Weight


@dataclasses.dataclass(frozen=True)
class Ia3:
    """What ``ia3`` returns."""

    def takes(self, use: Use) -> bool:
        """Whether a weight with this use can have such a change."""
        return use.operation in LINEAR and bool(use.outward)

    def usual(self, use: Use) -> bool:
        """Whether it has one where the user does not say which weights have."""
        return self.takes(use) and use.operation != "gather" and not use.is_head

    def init(self, key: Key, path: str, use: Use) -> dict[str, jax.Array]:
        """The parameters of the change of one weight."""
        shape = use.sizes(use.stack, use.outward)
        return {"scale": jnp.zeros(shape, use.adapter_dtype)}

    def fixed(self, path: str, use: Use) -> dict[str, jax.Array]:
        """What belongs to the change and is no parameter."""
        return {}

    def parts(self, params: dict[str, jax.Array], use: Use) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        return {"scale": Labeled(params["scale"], (*use.stack, *use.outward))}

    def changed(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """The output of an operation with the change; None if that needs the sum."""
        scale = weight.parts["scale"]
        if not {*scale.labels} <= {*at.out.labels}:
            return None
        factor = 1 + scale.to(at.out.labels)
        return at.out.array * factor.astype(at.out.array.dtype)

    def merged(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """The base with its channels scaled."""
        whole = base.array * (1 + parts["scale"].to(base.labels))
        return whole.astype(base.array.dtype)


def ia3() -> Ia3:
    """A scale for each channel that a weight gives, for ``adapt``."""
    return Ia3()

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Full fine-tuning: the change of a weight is any array of its shape.

The parameters are the difference from the base, which starts at zero: an algorithm that
pulls models towards zero, or sends what changed, then does so from the base.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedblend.core import Key
from fedblend.models.adapt.uses import Use
from fedblend.models.adapt.weight import Labeled, Meeting, Weight


@dataclasses.dataclass(frozen=True)
class Full:
    """What ``full`` returns."""

    def takes(self, use: Use) -> bool:
        """Whether a weight with this use can have such a change."""
        return True

    def usual(self, use: Use) -> bool:
        """Whether it has one where the user does not say which weights have."""
        return self.takes(use)

    def init(self, key: Key, path: str, use: Use) -> dict[str, jax.Array]:
        """The parameters of the change of one weight."""
        return {"change": jnp.zeros(use.shape, use.adapter_dtype)}

    def fixed(self, path: str, use: Use) -> dict[str, jax.Array]:
        """What belongs to the change and is no parameter."""
        return {}

    def parts(self, params: dict[str, jax.Array], use: Use) -> dict[str, Labeled]:
        """The parameters with the axes of the weight that theirs are."""
        return {"change": Labeled(params["change"], tuple(range(len(use.shape))))}

    def changed(self, weight: Weight, at: Meeting) -> jax.Array | None:
        """None: every operation needs the sum."""
        return None

    def merged(
        self, base: Labeled, parts: dict[str, Labeled], operation: str
    ) -> jax.Array:
        """The sum of base and change."""
        whole = base.array + parts["change"].to(base.labels)
        return whole.astype(base.array.dtype)


def full() -> Full:
    """Any change of weights, all of them unless ``where`` says which, for ``adapt``."""
    return Full()

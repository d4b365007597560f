# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Prefix tuning: keys and values that every row finds before its own, in each layer.

X. L. Li, P. Liang, Prefix-tuning: Optimizing continuous prompts for generation, ACL
2021; without its network that makes the prefix in training.
"""

import dataclasses

from fedblend.checks import COUNT, gate


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What ``prefix`` returns."""

    length: int


@gate(length=COUNT)
def prefix(length: int = 16) -> Prefix:
    """Learned keys and values for attention, for ``adapt``.

    Args:
        length: the number of places that stand before those of a row.
    """
    return Prefix(length)

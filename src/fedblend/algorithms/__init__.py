# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms, one file each: its equations, its reference, both halves.

A file in this folder is found because it exists: ``fedblend.registry`` imports them
all, and each registers its builder, which is then a name of this package. So is every
method of ``fedblend.contrib``, which has those that are not confirmed yet.
"""

from collections.abc import Callable

from fedblend.core import Algorithm
from fedblend.errors import ELSEWHERE
from fedblend.extras import find_elsewhere
from fedblend.registry import ALGORITHMS


def __getattr__(name: str) -> Callable[..., Algorithm]:
    """For type checkers, and for methods of distributions that are not installed."""
    if name in ELSEWHERE and name in ALGORITHMS:
        return ALGORITHMS[name].builder
    return find_elsewhere(__name__, name)


globals().update({name: entry.builder for name, entry in ALGORITHMS.items()})

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Comparisons with loops in NumPy, in float64.

A module of comparisons has ``gaps``, which gives the largest difference of each.
"""

from functools import cache
from importlib import import_module

import jax

TOLERANCE = 1e-10
"""Float64 rounds at 1e-16; the 60 steps of a comparison on parameters of size 1 stay
far below, and any other formula is off by 1e-3 or more."""


@cache
def find_gaps(module: str, *asked: str) -> dict[str, float]:
    """The gaps of a module that is imported, and run, in float64.

    In all threads: ``jax.enable_x64`` holds in one only, and a simulation has several.
    """
    jax.config.update("jax_enable_x64", True)
    try:
        return import_module(module).gaps(*asked)
    finally:
        jax.config.update("jax_enable_x64", False)


def check_method(gaps: dict[str, float], method: str, count: int) -> None:
    """The comparisons whose names begin with a method: so many, and equal."""
    mine = {name: gap for name, gap in gaps.items() if name.startswith(method)}
    assert len(mine) == count
    assert {name: gap for name, gap in mine.items() if not gap < TOLERANCE} == {}

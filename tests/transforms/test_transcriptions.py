# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DCGD, DIANA and EF21 against the papers' pseudo-code, in float64, cohorts and all."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TOLERANCE = 1e-10
"""Float64 rounds at 1e-16; nine rounds stay far below, another formula does not."""


@cache
def gaps(*asked: str) -> dict[str, float]:
    """The largest difference in every comparison, from a process in float64."""
    script = Path(__file__).with_name("compare_transforms.py")
    done = subprocess.run(
        [sys.executable, script, *asked], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found: dict[str, float], method: str, count: int) -> None:
    mine = {name: gap for name, gap in found.items() if name.startswith(method)}
    assert len(mine) == count
    assert {name: gap for name, gap in mine.items() if not gap < TOLERANCE} == {}


@pytest.mark.parametrize(("method", "count"), [("dcgd", 4), ("diana", 12), ("ef21", 8)])
def test_method_equals_its_papers_loop(method, count):
    check(gaps(), method, count)


@pytest.mark.slow
def test_diana_equals_its_papers_loop_however_memories_begin_and_move():
    check(gaps("all"), "diana", 36)

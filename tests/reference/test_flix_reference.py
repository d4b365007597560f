# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX against its paper's algorithms 1 to 3 in NumPy loops, in float64."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TOLERANCE = 1e-10
"""Float64 rounds at 1e-16; twelve rounds stay far below, another formula does not."""


@cache
def gaps(problem: str) -> dict[str, float]:
    """The largest difference in every comparison, from a process in float64."""
    script = Path(__file__).with_name("compare_flix.py")
    done = subprocess.run(
        [sys.executable, script, problem], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "problem", ["logistic", pytest.param("quadratics", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("solver", "count"), [("dgd", 4), ("dcgd", 2), ("diana", 8)])
def test_flix_equals_its_papers_loop(problem, solver, count):
    begun = f"{problem}, {solver}"
    mine = {name: gap for name, gap in gaps(problem).items() if name.startswith(begun)}
    assert len(mine) == count
    assert {name: gap for name, gap in mine.items() if not gap < TOLERANCE} == {}

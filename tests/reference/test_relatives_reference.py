# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2GD, partial methods, agnostic FL and MAPPER against NumPy loops, in float64."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-10
"""Float64 rounds at 1e-16; nine rounds stay far below, another formula does not."""


@pytest.fixture(scope="module")
def gaps() -> dict[str, float]:
    """The largest difference in every comparison, from a process in float64."""
    script = Path(__file__).with_name("compare_relatives.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("method", "count"),
    [("l2gd", 4), ("fedrep", 3), ("partial", 4), ("agnostic", 4), ("mapper", 4)],
)
def test_method_equals_its_papers_loop(gaps, method, count):
    mine = {name: gap for name, gap in gaps.items() if name.startswith(method)}
    assert len(mine) == count
    assert {name: gap for name, gap in mine.items() if not gap < TOLERANCE} == {}

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DCGD, DIANA and EF21 against the papers' pseudo-code, in float64, cohorts and all."""

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
    script = Path(__file__).with_name("compare_transforms.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("method", "count"), [("dcgd", 4), ("diana", 36), ("ef21", 8)])
def test_method_equals_its_papers_loop(gaps, method, count):
    mine = {name: gap for name, gap in gaps.items() if name.startswith(method)}
    assert len(mine) == count
    assert {name: gap for name, gap in mine.items() if not gap < TOLERANCE} == {}

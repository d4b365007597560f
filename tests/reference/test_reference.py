# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Against the papers' pseudo-code in NumPy loops, in float64, cohorts and all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-10
"""Float64 rounds at 1e-16; 9 rounds of 5 steps on parameters of size 1 stay far below,
and any other formula is off by 1e-3 or more."""

METHODS = {
    "fedavg": 4,
    "fedprox": 1,
    "fedopt": 4,
    "scaffold": 12,
    "svrg": 6,
    "local only": 1,
    "finetune": 1,
    "reptile": 8,
    "fomaml": 8,
}


@pytest.fixture(scope="session")
def gaps() -> dict[str, float]:
    """The largest difference in every comparison, from a process in float64."""
    script = Path(__file__).with_name("compare.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", METHODS)
def test_method_equals_its_papers_loop(gaps, method):
    mine = {name: gap for name, gap in gaps.items() if name.startswith(method)}
    assert len(mine) == METHODS[method]
    assert {name: gap for name, gap in mine.items() if not gap < TOLERANCE} == {}

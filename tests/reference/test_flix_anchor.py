# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Known optimal values of FLIX on real data, through DGD and through DIANA."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ANCHOR = [
    0.429032,
    0.429231,
    0.429564,
    0.430030,
    0.430630,
    0.431362,
    0.432229,
    0.433228,
    0.434362,
    0.435629,
]
"""min f~ on ijcnn1 for alpha 0.1 to 1, from independent solves, to six digits."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def values(data_home) -> dict[str, list[float]]:
    script = Path(__file__).with_name("flix_anchor.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("solver", ["dgd", "diana"])
def test_the_optimal_values_on_ijcnn1(values, solver):
    np.testing.assert_allclose(values[solver], ANCHOR, atol=1e-6, rtol=0)


def test_both_solvers_reach_the_same_optimum(values):
    np.testing.assert_allclose(values["dgd"], values["diana"], atol=1e-12, rtol=0)

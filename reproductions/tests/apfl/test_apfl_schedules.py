# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL's theorems on problems whose minimizers are known."""

import numpy as np
import pytest

from fedblend_reproductions.apfl import schedules, strongly_convex


@pytest.fixture(scope="module")
def noiseless():
    return strongly_convex.quadratics(4, 5, rows=1)


def test_gaps_are_those_of_the_loss(noiseless):
    point = np.random.default_rng(0).standard_normal(5)
    points = np.broadcast_to(point, (2, 4, 5))
    gaps = noiseless.gaps(points, np.array([1.0, 0.5]))
    for replica, spread in enumerate((1.0, 0.5)):
        loss = noiseless.loss(spread)
        for client in range(4):
            rows = noiseless.federated_data.train.rows(client)
            middle = noiseless.shared
            best = middle + spread * (noiseless.own[client] - middle)
            worth = [float(loss(x.astype(np.float32), rows)[0]) for x in (point, best)]
            assert gaps[replica, client] == pytest.approx(worth[0] - worth[1], rel=1e-4)


@pytest.mark.slow
def test_the_theorems_on_quadratics(tmp_path):
    finding = schedules.check(True, tmp_path)
    found = finding.numbers
    assert found["holds"]["f_i* solved to 1e-10"]
    full = found["groups"]["quadratics, full gradients"]
    # The drift of w within a round is left, times alpha: squared in the gap.
    assert full["power_of_alpha"] == pytest.approx(2, abs=0.3)
    assert full["power_of_spread"] == pytest.approx(2, abs=0.1)
    assert found["slopes"]["quadratics, full gradients"] < -1.8
    ends = {
        name: trace["gap"][0, :, -1].mean()
        for name, trace in found["groups"]["quadratics, noisy gradients"][
            "traces"
        ].items()
    }
    # A constant rate stays in the noise, averages are better than the last models.
    assert ends["averaged"] < ends["last iterate"] / 2
    assert ends["last iterate"] < ends["constant rate, last iterate"] / 3
    assert set(finding.figures) == {"steps"}

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL's claims on quadratics."""

import numpy as np
import pytest

from fedblend_reproductions.claims import Verdict
from fedblend_reproductions.mixed import (
    CLAIMS,
    fixed_points,
    gradient_recovery,
    quadratics,
)


def test_the_claims_are_in_the_order_of_the_ledger():
    names = [claim.name for claim in CLAIMS]
    assert names == [*(f"M{number}" for number in range(1, 13)), "T1"]
    assert all(claim.title and claim.paper for claim in CLAIMS)


@pytest.mark.slow
def test_parallel_training_ends_as_linear_algebra_says_and_transfers_at_the_optimum():
    finding = fixed_points.check(True)
    assert finding.verdict is Verdict.reproduced
    single = finding.numbers["single_step"]
    assert single["parallel_from_one_way"] < 1e-14
    assert single["two_way_from_one_way"] > 1e-3  # a round late
    assert max(single["ends"].values()) < 1e-13
    assert finding.numbers["parallel_from_linear_algebra"] < 1e-13
    distances = finding.numbers["distances"]["alike clients, FedAvg"]
    assert max(distances["one_way"].max(), distances["two_way"].max()) < 1e-13
    assert (distances["parallel"] > 1e-2).all()
    assert set(finding.figures) == {"distance"}


@pytest.mark.slow
def test_scaffold_underneath_lets_transfers_reach_the_optimum_of_clients_that_differ():
    numbers = fixed_points.check(False).numbers["distances"]
    over_fedavg = numbers["different clients, FedAvg"]
    over_scaffold = numbers["different clients, SCAFFOLD"]
    for how in ("one_way", "two_way"):
        assert over_fedavg[how].min() > 1e-4
        assert over_scaffold[how].max() < 1e-12
    assert over_scaffold["parallel"].min() > 1e-4


@pytest.mark.slow
def test_the_recovered_gradient_and_what_equation_10_does():
    finding = gradient_recovery.check(True)
    for errors in finding.numbers["errors"].values():
        assert max(errors.values()) < 1e-12
    for distances in finding.numbers["distances"].values():
        # Drift of FedAvg falls with the rate, the fault of equation (10) does not.
        np.testing.assert_allclose(
            distances["with weights"][0] / distances["with weights"][1], 0.1, rtol=0.01
        )
        assert distances["eq. (10)"].min() > 0.01
    assert finding.verdict is Verdict.partly
    assert set(finding.figures) == {"fixed_points"}


def test_equation_10_is_right_where_weights_are_equal(monkeypatch):
    of = quadratics.problem(alike=False)
    monkeypatch.setattr(gradient_recovery, "COUNTS", (1, 1, 1, 1))
    points = [
        gradient_recovery.standstill(of, 0.05, (1, 2, 3, 6), equation_10=formula)
        for formula in (False, True)
    ]
    np.testing.assert_allclose(*points, rtol=0, atol=1e-12)

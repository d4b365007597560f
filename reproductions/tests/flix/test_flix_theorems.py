# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The problems of FLIX's convex experiments, and its theorems measured on them."""

import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.claims import Verdict
from fedblend_reproductions.flix import bounds_and_plans, descent, logistic, one_shot
from fedblend_reproductions.flix.solver import gaps, solve

ANCHOR = {0.1: 0.429032, 0.5: 0.430630, 1.0: 0.435629}
"""Optimal values on ijcnn1 with 8 clients and an intercept, known to six digits."""


@pytest.fixture(scope="module")
def ijcnn1(data_home):
    return logistic.problem("ijcnn1", 8, intercept=True)


def test_newton_finds_the_known_optimal_values(ijcnn1):
    for alpha, value in ANCHOR.items():
        found = logistic.optimum(ijcnn1, alpha)
        assert found.value == pytest.approx(value, abs=6e-7)
        assert found.residual <= 1e-10
    assert ijcnn1.norms.max() <= 1e-10


def test_values_and_pure_local_models_agree_with_the_library(ijcnn1):
    rng = np.random.default_rng(0)
    alpha, point = rng.uniform(size=8), rng.standard_normal(ijcnn1.dim)
    mixed = alpha[:, None] * point + (1 - alpha)[:, None] * ijcnn1.personal
    losses = []
    for client in range(8):
        inputs, targets = ijcnn1.federated_data.train.rows(client)
        rows = (np.float32(inputs), targets)
        losses.append(float(ijcnn1.loss(np.float32(mixed[client]), rows).mean()))
    ours = logistic.values(ijcnn1, alpha, point[None])[0]
    assert ours == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_solver_starts_where_it_should_and_counts_what_is_sent(ijcnn1):
    step = fb.theory.steps.dgd(1.0, ijcnn1.smoothness)
    trace = solve(ijcnn1, [1.0], [step], rounds=3)
    known = ijcnn1.mixture(1.0)
    np.testing.assert_allclose(trace.points[0, 0, 0], known.average, rtol=1e-12)
    assert trace.floats.tolist() == [0, ijcnn1.dim, 2 * ijcnn1.dim, 3 * ijcnn1.dim]
    falling = gaps(ijcnn1, [1.0], trace.points)[0, 0]
    assert (np.diff(falling) < 0).all() and falling[-1] > 0


@pytest.mark.slow
def test_propositions_and_one_shot_theorems(data_home):
    found = one_shot.F1.check(True)
    assert found.verdict is Verdict.reproduced
    measured = found.numbers["mushrooms"]
    assert found.numbers["local_steps_error"] < 1e-13
    assert 0 < measured["gap_over_bound"].max() < 1
    assert 0 < measured["gradient_over_bound"].max() < 1
    assert 1 < measured["least_bend_over_mu"] < 2
    assert 0.3 < measured["largest_bend_over_L"] < 1
    assert set(found.figures) == {"one_shot"}


@pytest.mark.slow
def test_the_bound_of_descent(data_home):
    found = bounds_and_plans.F2.check(True)
    assert found.verdict is Verdict.reproduced
    gap, bound = found.numbers["gaps"]["ijcnn1"], found.numbers["bounds"]["ijcnn1"]
    assert (gap <= bound + 1e-12).all()
    assert gap[1, 0] > 1e-3 and gap[1, 10] < 1e-10
    assert set(found.figures) == {"bound"}


@pytest.mark.slow
def test_plans_reach_their_accuracy(data_home):
    found = bounds_and_plans.F10.check(True)
    assert found.verdict is Verdict.reproduced
    for which in ("dgd", "diana"):
        one = found.numbers[f"ijcnn1 {which}"]
        assert (one["gap"] <= one["eps"]).all()
        assert one["rounds"].max() > 2
        assert (one["early"] < 1).all()
    assert set(found.figures) == {"plans"}


@pytest.mark.slow
def test_descent_falls_alike_for_all_alpha(data_home):
    found = descent.F3.check(True)
    for start in ("ones", "average"):
        loss = found.numbers[f"loss ijcnn1 {start}"]
        assert (np.diff(loss[:, 0]) > 0).all()
        slopes = found.numbers[f"slopes ijcnn1 {start}"]
        # (1 - mu/L)^2 a round is the slowest that descent can be.
        slowest = -2 * np.log10(1 - 0.1 / 0.1917)
        assert slopes.min() > 0.9 * slowest
        assert slopes.max() / slopes.min() < 1.1
    assert found.verdict is Verdict.reproduced
    assert set(found.figures) == {"ones", "average"}

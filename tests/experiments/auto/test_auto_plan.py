# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Grids of one size, plans that fit a time, and what is seen in a table."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import fedblend as fb
from fedblend.experiments.auto import (
    budget,
    candidates,
    constant,
    description,
    table,
    tuning,
)
from fedblend.experiments.auto.budget import LADDER, Speed, cuts, plan_for
from fedblend.experiments.auto.candidates import (
    CANDIDATES,
    Request,
    configuration,
    grid,
)


@pytest.mark.parametrize("size", candidates.SIZES)
def test_all_grids_have_one_size_and_the_same_rates_at_the_ends(size):
    for candidate in CANDIDATES:
        points = grid(candidate, size)
        assert len(set(points)) == size
        rates = {point.rate for point in points}
        assert (min(rates), max(rates)) == candidates.RATES


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.name)
def test_configurations_have_the_point(candidate, tmp_path):
    point = grid(candidate, 6)[-1]
    request = Request(tmp_path / "t.csv", "hospital", "outcome")
    config = configuration(request, candidate, point, seeds=[0, 1], rounds=7)
    assert config.algorithm.rate == point.rate and config.run.seed == [0, 1]
    if candidate.setting is not None:
        table = config.algorithm
        for name in candidate.setting.split("."):
            table = getattr(table, name)
        assert table == point.value


def test_a_rate_that_ruins_one_client_is_out():
    """Its mean over the other clients is the best, and does not count."""

    def record(round, means, clients):
        each = zip(means, clients, strict=True)
        looks = [{"mse": SimpleNamespace(mean=m, clients=c)} for m, c in each]
        return [
            SimpleNamespace(round=round, measures={"validation": {"personal": look}})
            for look in looks
        ]

    blocks = [record(0, [9, 9, 9], [5, 5, 5]), record(4, [3, 1, 2], [5, 4, 5])]
    run: Any = SimpleNamespace(records=blocks)
    points = grid(CANDIDATES[0], 4)[:3]
    assert tuning._best(run, points, 1, "mse") == (2.0, 2, 4)


def test_plan_shrinks_with_the_time():
    fast, slow = Speed(1.0, 1e-5), Speed(1.0, 1.0)
    assert plan_for(300, fast, 7, 20) == LADDER[0]
    assert cuts(LADDER[0]) == ""
    assert plan_for(300, slow, 7, 20) == LADDER[-1]
    assert "of 5 splits" in cuts(LADDER[-1])
    speeds = [Speed(1.0, 10**-power) for power in np.linspace(5, 1, 30)]
    places = [LADDER.index(plan_for(300, speed, 7, 20)) for speed in speeds]
    assert places == sorted(places)


def test_few_clients_have_more_splits():
    assert plan_for(300, Speed(1.0, 1e-5), 7, 2).seeds == 2 * LADDER[0].seeds


def test_slow_compiling_does_not_starve_methods():
    assert plan_for(300, Speed(30.0, 1e-5), 7, 20) == LADDER[0]


def test_plan_estimates_what_it_takes():
    plan = budget.Plan(2, 4, 10)
    speed = Speed(1.0, 0.01)
    assert speed.computing(plan, 1) == pytest.approx((2 * 4 + 2) * 10 * 2 * 0.01)


def test_variance_between_clients_is_that_of_an_anova():
    """The F statistic by scipy; the share less chance is epsilon squared."""
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(5), [10, 20, 30, 15, 25])
    values = draw.normal(size=(100, 1)) + owner[:, None] * 0.3
    f = stats.f_oneway(*(values[owner == i, 0] for i in range(5))).statistic
    expected = (f - 1) * 4 / (f * 4 + 95)
    assert description.between(values, owner)[0] == pytest.approx(expected)
    assert description.between(np.ones((100, 1)), owner)[0] == 0


def test_constants_against_closed_form():
    targets = np.array([0, 0, 0, 1] * 5 + [1, 1, 1, 0] * 5)
    rows = np.zeros((40, 1), np.float32), targets
    parts = [np.arange(20), np.arange(20, 40)]
    data = fb.federate(rows, parts, validation=0.2, test=0.2)
    found = constant.constant_losses(data, "binary", 1, "test")
    train = data.train.rows(0)[1]
    ones = (train.sum() + 1) / (len(train) + 2)
    tested = data.splits["test"].rows(0)[1]
    expected = -np.mean(np.where(tested == 1, np.log(ones), np.log(1 - ones)))
    assert found[1, 0] == pytest.approx(expected)
    assert found.shape == (2, 2)


def test_a_metric_that_no_client_has_is_left_out():
    """An area under the curve where every client has one class: no number."""
    spreads = {"log_loss": {"mean": 0.5}, "auc": {"mean": None}}
    run = {"measures": {"test": {"personal": spreads}}, "bits": {"up": 8, "down": 8}}
    found = table.numbers({"runs": [run, run]}, 4, "log_loss")
    assert found["test"] == 0.5 and found["metrics"]["auc"] is None
    spreads["log_loss"]["mean"] = None
    assert table.numbers({"runs": [run]}, 4, "log_loss")["test"] == np.inf

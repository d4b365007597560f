# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``auto`` tells of clients: against the table itself, and against formulas."""

import numpy as np
import pytest

from fedblend.data.dataset import Task, generator
from fedblend.runs.auto.insight import calibration, cross_predict, effects
from fedblend.runs.auto.linear import PooledRows


def rows_of(clients=3, each=200, level=0.0):
    draw = generator(0, "insight")
    inputs = np.hstack([np.ones((clients * each, 1)), draw.normal(size=(600, 1))])
    chance = 1 / (1 + np.exp(-inputs[:, 1] - level * (np.arange(600) < each)))
    counts = np.full(clients, each)
    return PooledRows(inputs, (draw.random(600) < chance).astype(int), counts)


TASK = Task("binary", 1, (1,), ("no", "yes"))


def test_the_interval_is_wilsons():
    rows = rows_of()
    found = calibration(TASK, "fedavg", rows, {"ridge": 1e-3}, 1)
    for line, at in zip(found, rows.clients, strict=True):
        share, n, z = rows.targets[at].mean(), 200, 1.959964
        middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
        ends = [line["observed_low"], line["observed_high"]]
        assert ends == pytest.approx([middle - half, middle + half], rel=1e-5)


def test_one_model_is_off_where_a_client_has_its_own_level():
    rows = rows_of(level=3.0)
    one, own = (
        calibration(TASK, method, rows, setting, 1)[0]
        for method, setting in (
            ("fedavg", {"ridge": 1e-3}),
            ("own_intercepts", {"level": 10.0, "ridge": 1e-3}),
        )
    )
    assert one["expected"] < one["observed_low"]
    assert own["observed_low"] < own["expected"] < own["observed_high"]


def test_no_row_predicts_itself():
    """Changing one row's target changes predictions of other folds only."""
    rows = rows_of()
    before = cross_predict(TASK, "fedavg", rows, {"ridge": 1e-3})
    rows.targets = rows.targets.copy()
    rows.targets[7] = 1 - rows.targets[7]
    after = cross_predict(TASK, "fedavg", rows, {"ridge": 1e-3})
    fold = np.arange(600) % 5 == 7 % 5
    assert before is not None and after is not None
    np.testing.assert_array_equal(before[fold], after[fold])
    assert (before[~fold] != after[~fold]).all()


def test_effects_are_in_the_unit_of_the_target():
    rows = rows_of()
    rows.targets = 2.0 * rows.inputs[:, 1] + generator(1, "noise").normal(size=600)
    task = Task("regression", 1, (1,), scale=10.0)
    names = ["a", "b", "c"]
    level, slope = effects(task, "fedavg", rows, {"ridge": 0.0}, names, None)
    assert (level["client"], level["input"], slope["input"]) == ("", "level", "input 0")
    assert slope["effect"] == pytest.approx(20.0, rel=0.05)
    # 10 times two standard errors of a slope of 600 rows with noise 1, both ways.
    assert slope["high"] - slope["low"] == pytest.approx(2 * 19.6 / 600**0.5, rel=0.1)
    odds = effects(TASK, "fedavg", rows_of(), {"ridge": 0.0}, names, None)[1]
    assert np.log(odds["effect"]) == pytest.approx(1.0, abs=0.25)


def test_counts_are_told_in_their_unit():
    """Means of 5 exp(x): the errors are those of Poisson's likelihood."""
    rows, draw = rows_of(), generator(2, "counts")
    counts = draw.poisson(5 * np.exp(rows.inputs[:, 1]))
    task = Task("counts", 1, (1,), center=np.log(5.0))
    rows.targets = task.change_unit(counts.astype(float))
    line = calibration(task, "fedavg", rows, {"ridge": 0.0}, 1)[0]
    assert line["expected"] == pytest.approx(counts[:200].mean(), rel=0.1)
    assert line["observed_low"] < counts[:200].mean() < line["observed_high"]
    slope = effects(task, "fedavg", rows, {"ridge": 0.0}, ["a", "b", "c"], None)[1]
    mean = 5 * np.exp(rows.inputs[:, 1])
    error = np.linalg.inv((rows.inputs.T * mean) @ rows.inputs)[1, 1] ** 0.5
    assert slope["effect"] == pytest.approx(np.e, rel=0.1)
    width = np.log(slope["high"] / slope["low"])
    assert width == pytest.approx(2 * 1.96 * error, rel=0.05)

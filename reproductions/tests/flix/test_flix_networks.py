# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9: images by writer and text by role."""

import numpy as np
import pytest

from fedblend.data.dataset import Dataset
from fedblend_reproductions.claims import Verdict
from fedblend_reproductions.flix import images, text
from fedblend_reproductions.flix import network_choice as choice
from fedblend_reproductions.flix import network_runs as runs
from fedblend_reproductions.flix.network_report import Gap, by_alpha, compared, verdict
from fedblend_reproductions.flix.network_task import ALPHAS, Score, Setting, largest


def score(validation, test, clients=(0.0,)):
    return Score(np.array([0]), np.array([test]), validation, np.array(clients))


def row(*clients):
    return choice.Row("", 1, [score(0.0, 0.0, those) for those in clients])


def test_settings_are_chosen_on_validation_rows_over_all_seeds():
    """One seed that is best does not make up for another that diverged."""
    good, wild = (Setting(runs.FEDAVG, "", 1.0, rate) for rate in (1.0, 3.0))
    found = choice.by_setting(
        {
            (good, 0): score(0.5, 0.0),
            (wild, 0): score(0.6, 1.0),
            (good, 1): score(0.5, 0.0),
            (wild, 1): score(float("nan"), 1.0),
        }
    )
    trial = {one: choice.Row("", 2, those).validation for one, those in found.items()}
    assert choice.ranked(trial, trial) == [good, wild]


def test_each_alpha_is_carried_on_once():
    settings = [
        Setting(runs.LOCAL, "few", a, r) for a in (0.3, 0.7) for r in (1.0, 2.0)
    ]
    trial = dict(zip(settings, (0.1, 0.2, 0.9, 0.8), strict=True))
    assert choice.of_each_alpha(trial, settings, 2) == [settings[2], settings[1]]


@pytest.mark.parametrize("task", [images, text])
def test_all_methods_try_as_many_settings(task):
    plan, local = task.FULL, runs.LOCAL
    flix, shared = choice.flix_settings(plan, local), choice.fedavg_settings(plan)
    count = len(set(flix))
    assert count == len({*shared, *choice.control_settings(plan, local)})
    assert count == len(set(choice.flix_settings(plan, runs.ONE)))
    assert count == len(set(choice.control_settings(plan, runs.ONE)))
    for work in (plan.own, plan.tune):
        assert count == plan.snapshots * len(work.rates)


def test_the_figure_has_the_setting_that_is_best_on_validation_rows():
    """Of several with alpha 1 that were run to the end, whatever their order."""

    def ended(*scores):
        return choice.Row("", 1, [score(*one) for one in scores])

    flix = {
        Setting(runs.ONE, "few", a, 1.0): ended((0.1, 0.2), (0.1, 0.2)) for a in ALPHAS
    }
    shared = {
        Setting(runs.ONE, "few", 1.0, rate): ended((good, good), (good, good))
        for rate, good in ((1.0, 0.3), (2.0, 0.5), (3.0, 0.4))
    }
    trial = dict.fromkeys([*flix, *shared], 0.1)
    outcome = choice.Outcome(flix, shared, ended((0, 0)), ended((0, 0)), trial)
    figure = by_alpha(outcome, dict.fromkeys([*ALPHAS, 1.0], 0.5))
    drawn = figure.axes[1].lines[0]
    assert drawn.get_xdata()[-1] == 1
    assert drawn.get_ydata()[-1] == pytest.approx(0.5)


def test_gaps_weigh_clients_by_their_test_rows():
    """Gaps .5 and 0 on 30 and 10 rows: .375, deviations .125 * 3/4 and .375 / 4."""
    gap = compared(
        row([1.0, 0.5, np.nan]), row([0.5, 0.5, np.nan]), np.array([30, 10, 0])
    )
    assert gap.mean == pytest.approx(0.375)
    assert gap.clients == pytest.approx(np.hypot(0.125 * 0.75, 0.375 * 0.25))
    assert gap.half == pytest.approx(1.96 * gap.clients)


def test_intervals_are_over_seeds_too():
    """Gaps .1 and .3 of two seeds, alike for both clients: error .1, Student's 12.7."""
    ours, other = row([0.6, 0.6], [0.8, 0.8]), row([0.5, 0.5])
    gap = compared(ours, other, np.array([1, 1]))
    assert gap.mean == pytest.approx(0.2)
    assert gap.clients == pytest.approx(0.0)
    assert gap.half == pytest.approx(12.71 * 0.1)


@pytest.mark.parametrize(
    ("means", "short", "wanted"),
    [
        ((0.03, 0.02), 0.05, Verdict.reproduced),
        ((0.03, 0.02), 0.06, Verdict.partly),
        ((0.03, 0.01), 0.0, Verdict.partly),
        ((0.03, 0.0), 0.0, Verdict.differs),
    ],
)
def test_the_criterion(means, short, wanted):
    gaps = [Gap(mean, 0.015, 0.0, 0.0) for mean in means]
    assert verdict(gaps, short) == wanted


def test_the_largest_clients_keep_their_test_rows():
    keys, test_keys = np.array(list("abbccc")), np.array(list("abc"))
    rows, test_rows = (np.arange(6), np.arange(6)), (np.arange(3), np.arange(3))
    data = Dataset(rows, "classes", 6, test_rows, keys, test_keys)
    small = largest(data, 2)
    assert small.rows[0].tolist() == [1, 2, 3, 4, 5]
    assert small.keys is not None
    assert small.keys.tolist() == list("bbccc")
    assert small.test_rows is not None
    assert small.test_rows[1].tolist() == [1, 2]


@pytest.mark.slow
def test_text_quick(data_home, tmp_path, monkeypatch):
    found = text.check(True, tmp_path)
    rows = found.numbers["rows"]
    # A blank is a fifth of all characters; pairs tell more.
    assert rows["FLIX"]["test_by_examples"] > 0.22
    assert rows["FLIX"]["test_by_examples"] > rows["alone"]["test_by_examples"]
    assert f"{rows['FedAvg']['test_by_examples']:.4f} (" in found.ours
    assert found.criterion
    assert set(found.figures) == {"rounds", "alphas"}
    seeds = "test_by_examples[seed][record]"
    for name in ("FLIX", "FedAvg", "alpha 1, local steps"):
        first, second = rows[name][seeds]
        assert rows[name]["rounds"][-1] == text.QUICK.rounds
        assert not np.array_equal(first, second)

    def refuse(*arguments, **named):
        raise AssertionError("run again")

    monkeypatch.setattr(runs, "simulated", refuse)
    assert text.check(True, tmp_path).ours == found.ours


@pytest.mark.slow
def test_images_quick(data_home, tmp_path):
    rows = images.check(True, tmp_path).numbers["rows"]
    ours = rows["FLIX, one gradient a round"]["test_by_examples"]
    assert ours > 0.7  # ten digits: a guess is right in a tenth
    assert ours > rows["FedAvg"]["test_by_examples"] + 0.1

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL's tables: methods tuned alike, and long claims resume where they stopped."""

import jax
import numpy as np
import pytest

import fedblend as fb
from fedblend_reproductions.apfl import (
    alpha_rate,
    convex,
    images,
    methods,
    personal_methods,
    runs,
    writers,
)
from fedblend_reproductions.apfl.tables import beyond, chosen, table
from fedblend_reproductions.cache import Cache

ROUNDS = 6


@pytest.fixture(scope="module")
def task():
    digits = fb.datasets.load("digits")
    parts = fb.partition.classes_per_client(digits.rows[1], 6, classes=2)
    federated_data = fb.federate(digits.rows, parts, validation=0.2, test=0.3)
    model = fb.models.softmax(64, 10)
    loss = fb.losses.cross_entropy(model.apply)
    return runs.Task(
        federated_data, model, loss, 5, 10, ROUNDS, None, (1e-4, 0.1), 2, 2, 2
    )


@pytest.fixture(scope="module")
def answers(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cached")
    which = (methods.FEDAVG, methods.FIXED[0])
    rows = runs.compare(task, which, Cache(folder, task.settings()))
    return folder, which, rows


@pytest.mark.slow
def test_the_rate_is_chosen_on_validation_rows_and_other_seeds_are_reported(
    task, answers
):
    _, _, rows = answers
    assert list(rows) == ["FedAvg", "FedAvg, localized", "APFL, alpha 0.25"]
    for row in rows.values():
        assert row.rate == 0.1
        assert row.tried[0.1] > row.tried[1e-4]
        assert row.last.shape == (2,)
        assert row.last[0] != row.last[1]
        assert row.rounds[-1] == ROUNDS
        np.testing.assert_allclose(row.last, np.nanmean(row.clients, axis=1), 1e-5)


@pytest.mark.slow
def test_a_row_is_what_the_library_says_of_that_seed(task, answers):
    _, _, rows = answers
    run = fb.simulate(
        methods.FEDAVG.build(task, np.float32(0.1)),
        task.model.init,
        task.federated_data,
        jax.random.key(1),
        rounds=ROUNDS,
        every=ROUNDS,
        splits=["test"],
        measure={"accuracy": fb.metrics.accuracy(task.model.apply)},
    ).complete()
    measured = run.records[-1].measures["test"]
    assert rows["FedAvg"].last[0] == pytest.approx(
        measured["shared"]["accuracy"].mean, abs=1e-6
    )
    assert rows["FedAvg, localized"].last[0] == pytest.approx(
        measured["personal"]["accuracy"].mean, abs=1e-6
    )


@pytest.mark.slow
def test_what_was_measured_is_not_measured_again(task, answers, monkeypatch):
    folder, which, rows = answers

    def refuse(*arguments):
        raise AssertionError("measured again")

    monkeypatch.setattr(runs, "run", refuse)
    again = runs.compare(task, which, Cache(folder, task.settings()))
    for label, row in rows.items():
        np.testing.assert_array_equal(again[label].clients, row.clients)
    other = task._replace(rounds=ROUNDS + 2)
    with pytest.raises(AssertionError, match="measured again"):
        runs.compare(other, which, Cache(folder, other.settings()))


@pytest.mark.slow
def test_who_is_better_by_how_much(answers):
    _, _, rows = answers
    label = chosen(rows, rows)
    best = rows[label].curves["validation"]["accuracy"][:, -1].mean()
    assert all(
        row.curves["validation"]["accuracy"][:, -1].mean() <= best
        for row in rows.values()
    )
    gap, error = beyond(rows, "APFL, alpha 0.25", "FedAvg")
    wanted = rows["APFL, alpha 0.25"].clients - rows["FedAvg"].clients
    assert gap == pytest.approx(np.nanmean(wanted))
    assert 0 < error < 1
    assert [line[0] for line in table(rows, {})[1:]] == list(rows)


def test_a_seed_that_diverges_under_a_method_is_found():
    losses = np.array([[2.0, 1.0], [2.0, 9.0], [2.0, np.nan], [2.0, 0.5]])
    fine = runs.Row(0.1, {}, np.arange(2), {"train": {"loss": losses}}, losses, losses)
    late = np.array([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [2.0, 2.5]])
    other = fine._replace(curves={"train": {"loss": late}})
    rows = {"one": fine, "two": other}
    assert alpha_rate.finished(rows) == [True, False, False, False]


def test_rates_are_as_good_up_to_a_tie():
    assert runs.as_good({0.1: 0.9801, 0.3: 0.9805, 1.0: None}) == [0.1, 0.3]
    assert runs.as_good({0.1: 0.97, 0.3: 0.98, 1.0: 0.5}) == [0.3]


@pytest.mark.parametrize(
    ("late", "wanted"),
    [({0.1: 0.8, 0.3: 0.9}, 0.3), ({0.1: 0.9, 0.3: 0.8}, 0.1), ({0.1: 0.1}, 0.1)],
)
def test_of_rates_that_tie_early_the_one_that_is_best_late(
    task, tmp_path, monkeypatch, late, wanted
):
    """The second seed diverges where ``late`` says nothing."""

    def pretended(task, method, rates, seeds):
        def replica(rate, seed):
            end = 0.7 if task.rounds == ROUNDS // 2 else late.get(rate)
            end = 0.99 if end is None and seed == 1 else end
            curve = {"accuracy": [0.1, end], "loss": [1.0, 1.0]}
            return {
                "rounds": [0, task.rounds],
                "curves": {"personal": {"validation": curve, "test": curve}},
                "clients": {"personal": [0.5]},
                "alphas": [],
            }

        return list(map(replica, rates, seeds))

    monkeypatch.setattr(runs, "run", pretended)
    this = task._replace(rates=(0.1, 0.3), tuning=ROUNDS // 2)
    rows = runs.compare(this, [methods.FIXED[0]], Cache(tmp_path, this.settings()))
    assert rows["APFL, alpha 0.25"].rate == wanted


def test_a_method_with_two_rates_is_tried_at_pairs_of_them(task, tmp_path, monkeypatch):
    """PFedMe's best pair is none of equal rates."""

    def pretended(task, method, rates, seeds):
        def replica(rate):
            end = 0.9 if rate == (0.01, 0.05) else 0.5
            curve = {"accuracy": [0.1, end], "loss": [1.0, 1.0]}
            return {
                "rounds": [0, task.rounds],
                "curves": {
                    "personal": {
                        split: curve for split in ("train", "validation", "test")
                    }
                },
                "clients": {"personal": [0.5]},
                "alphas": [],
            }

        return list(map(replica, rates))

    monkeypatch.setattr(runs, "run", pretended)
    rows = runs.compare(task, [methods.PFEDME], Cache(tmp_path, task.settings()))
    assert rows["pFedMe"].rate == (0.01, 0.05)
    assert len(rows["pFedMe"].tried) == len(methods.PAIRS) > len(task.rates)
    assert table(rows, {})[1][1] == "0.01 0.05"


@pytest.mark.slow
@pytest.mark.parametrize(
    "claim",
    [
        convex.A1,
        convex.A2,
        images.A4,
        writers.A5,
        personal_methods.A6,
        personal_methods.A6B,
        alpha_rate.A11,
    ],
)
def test_quick_checks(claim, tmp_path, data_home):
    finding = claim.check(True, tmp_path)
    assert finding.figures
    assert finding.ours

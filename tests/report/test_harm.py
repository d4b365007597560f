# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who gains and who is harmed."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedblend.metrics import standard
from fedblend.report.measures import Clients, compare_models, harm_rows
from fedblend.report.terminal import show
from fedblend.stats.gains import Evidence, harms

NOTHING: Any = lambda *of: None  # noqa: E731
METRICS = standard("classes", NOTHING, NOTHING)
NAN = float("nan")
TEST = np.array([30, 40, 50, 0])
LOSSES = {
    "test": {
        "personal": {"loss": np.array([1.0, 2.0, 0.5, NAN])},
        "shared": {"loss": np.array([1.5, 1.5, 0.5, NAN])},
        "local": {"loss": np.array([0.9, 2.5, 0.6, NAN])},
    }
}
CLIENTS = Clients(
    ids=np.array([4, 5, 6, 7]),
    names=["a", "b", "c", "d"],
    train=np.array([10, 20, 30, 1]),
    test=TEST,
    alpha=np.array([0.1, 0.5, 0.9, 1.0]),
)


def by_rows(noise: float) -> dict:
    """Rows whose means are the losses above; noise is none of training alone."""
    found = {}
    for model, values in LOSSES["test"].items():
        rows = np.full((4, 50), NAN)
        for client, count in enumerate(TEST):
            wave = noise * np.resize([1.0, -1.0], count) * (model != "local")
            rows[client, :count] = values["loss"][client] + wave
        found[model] = {"loss": rows}
    return {"test": found}


@pytest.fixture
def found():
    evidence = Evidence([LOSSES], [by_rows(0.5)], {"test": TEST}, METRICS)
    answer = compare_models(evidence, "test", "loss")
    assert answer is not None
    return answer


def test_a_smaller_loss_is_a_gain(found):
    gains = {name: gain.value for name, gain in found.gains.items()}
    np.testing.assert_allclose(gains["local"], [-0.1, 0.5, 0.1, NAN], atol=1e-12)
    np.testing.assert_allclose(gains["shared"], [0.5, -0.5, 0.0, NAN])


def test_of_accuracies_more_is_a_gain():
    measured = {
        "test": {
            "personal": {"accuracy": np.array([0.9])},
            "local": {"accuracy": np.array([0.7])},
        }
    }
    answer = compare_models(
        Evidence([measured], (), {"test": np.array([10])}, METRICS), "test", "accuracy"
    )
    assert answer is not None
    assert answer.gain.value == pytest.approx([0.2])


def test_the_most_harmed_come_first_and_intervals_say_who_is(found):
    rows = harm_rows(found, CLIENTS)
    assert [row["name"] for row in rows] == ["b", "a", "c", "d"]
    error = 0.5 / np.sqrt(39)  # of 40 rows, half of them 0.5 above and half below
    assert rows[0] == {
        "id": 5,
        "name": "b",
        "train": 20,
        "test": 40,
        "alpha": 0.5,
        "shared_loss": 1.5,
        "local_loss": 2.5,
        "personal_loss": 2.0,
        "gain_over_local": 0.5,
        "gain_over_shared": -0.5,
        "harm": 0.5,
        "gain_low": pytest.approx(0.5 - 2.0227 * error, abs=1e-4),
        "gain_high": pytest.approx(0.5 + 2.0227 * error, abs=1e-4),
        "harmed": "no",
        # Both models have the same noise in every row: nothing is left to doubt.
        "gain_over_shared_low": pytest.approx(-0.5),
        "gain_over_shared_high": pytest.approx(-0.5),
        "harmed_by_shared": "yes",
    }
    # It loses 0.1 to training alone, which its 30 rows cannot tell from nothing.
    assert rows[1]["harm"] == pytest.approx(0.1)
    assert rows[1]["gain_low"] < -0.1 < 0 < rows[1]["gain_high"]
    assert rows[1]["harmed"] == "no"
    assert rows[-1]["harm"] == rows[-1]["personal_loss"] == rows[-1]["harmed"] == ""


def test_one_model_for_all_has_nothing_to_compare_with():
    same = {"loss": np.array([1.0, NAN])}
    measured = {"test": {"personal": same, "shared": same}}
    assert (
        compare_models(
            Evidence([measured], (), {"test": TEST}, METRICS), "test", "loss"
        )
        is None
    )
    assert compare_models(Evidence([{}], (), {}, METRICS), "test", "loss") is None


def test_terminal_summary_and_table_count_alike(make_row):
    """Of four clients with ten rows two lose, one of them beyond doubt."""
    lost = np.array([8, 3, 0, -8])

    def right(many):
        rows = np.arange(10) < many[:, None]
        return {"accuracy": rows.mean(1)}, {"accuracy": rows.astype(float)}

    own, alone = (
        right(9 - np.maximum(lost, 0)),
        right(9 + np.minimum(lost, 0)),
    )
    seen, rows = ({"test": {"personal": own[i], "local": alone[i]}} for i in (0, 1))
    evidence = Evidence([seen] * 2, [rows] * 2, {"test": np.full(4, 10)}, METRICS)
    found = compare_models(evidence, "test", "accuracy")
    assert found is not None
    counted = harms(evidence)["test"]["accuracy"]["than_local"]
    assert (counted["count"], counted["helped"], counted["worse"]) == (1, 1, 2)
    told = [row["harmed"] for row in harm_rows(found, CLIENTS)]
    assert told == ["yes", "no", "no", "no"]
    page = io.StringIO()
    console = Console(file=page, width=200)
    show({"runs": [make_row(0)] * 2, "harmed": harms(evidence)}, console)
    assert "Of 4 clients, 1 is clearly better off and 1 is clearly worse off" in (
        page.getvalue()
    )


def test_where_nothing_is_finite_all_is_written_and_says_so():
    lost = {model: {"loss": np.full(4, NAN)} for model in ("personal", "local")}
    evidence = Evidence([{"test": lost}], (), {"test": TEST}, METRICS)
    found = compare_models(evidence, "test", "loss")
    assert found is not None
    told = [row["harmed"] for row in harm_rows(found, CLIENTS)]
    assert told == ["not finite"] * 3 + [""]


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_gain_is_an_improvement_whichever_way_is_better(evidence, metric):
    found = compare_models(evidence, "test", metric)
    assert found is not None
    np.testing.assert_allclose(found.gain.value, [0.4, 0, -0.25, 0.1], atol=1e-12)
    assert (list(found.gains), found.seeds) == (["local"], 2)


def test_without_another_model_there_are_no_gains(evidence):
    for replica in evidence.measured:
        replica["test"].pop("local", None)
    assert compare_models(evidence, "test", "accuracy") is None
    assert compare_models(evidence._replace(measured=[]), "test", "accuracy") is None


def test_one_model_for_all_gains_nothing_over_itself(evidence):
    for replica in evidence.measured:
        replica["test"]["local"] = replica["test"]["personal"]
    assert compare_models(evidence, "test", "accuracy") is None


def test_models_that_are_nowhere_finite_are_not_taken_for_one(evidence):
    nothing = {name: np.full(4, np.nan) for name in ("accuracy", "loss")}
    replica = {"test": {"personal": nothing, "local": nothing}}
    found = compare_models(evidence._replace(measured=[replica]), "test", "accuracy")
    assert found is not None
    assert found.gain.not_finite.all()

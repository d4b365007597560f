# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import pytest

from fedblend.report.measures import list_metrics, main_splits
from fedblend.report.series import learning_curves


def line_of(rows, metric: str) -> dict:
    """The curve of the personal model's mean on test rows."""
    wanted = {"split": "test", "model": "personal", "metric": metric, "of": "mean"}
    lines = learning_curves(rows)["lines"]
    return next(line for line in lines if wanted.items() <= line.items())


def test_a_curve_is_the_mean_over_seeds_with_their_range(rows):
    found, line = learning_curves(rows), line_of(rows, "accuracy")
    # Over clients 0.8 + 0.015, and 0.01 a round; the second seed is 0.001 above.
    assert line["v"] == pytest.approx([0.8155, 0.8355, 0.8555])
    assert line["low"] == pytest.approx([0.815, 0.835, 0.855])
    assert line["high"] == pytest.approx([0.816, 0.836, 0.856])
    assert (found["round"], found["bits_up"]) == ([0, 2, 4], [0, 2000, 4000])


def test_only_rounds_that_all_seeds_have_are_drawn(rows):
    assert learning_curves(rows[:-1])["round"] == [0, 2]


def test_a_missing_value_is_a_gap(rows):
    rows[2]["measures"]["test"]["personal"]["loss"]["mean"] = None
    assert [value is None for value in line_of(rows, "loss")["v"]] == [0, 1, 0]


def test_models_that_were_not_measured_have_no_curve(make_row):
    rows = [make_row(number, models=("personal",)) for number in (0, 1)]
    assert {line["model"] for line in learning_curves(rows)["lines"]} == {"personal"}


def test_held_out_rows_and_the_main_metric_come_first(rows):
    assert main_splits(rows) == ["test"]
    assert list_metrics(rows, "test") == ["accuracy", "loss"]
    for row in rows:
        del row["measures"]["test"]
    assert main_splits(rows) == ["train"]


def test_numbered_metrics_are_of_their_kind(rows):
    for models in rows[-1]["measures"]["test"].values():
        models["recall@5"] = models.pop("accuracy")
    assert list_metrics(rows, "test") == ["recall@5", "loss"]
    for models in rows[-1]["measures"]["test"].values():
        models["auc"] = models["recall@5"]
    assert list_metrics(rows, "test") == ["recall@5", "auc", "loss"]

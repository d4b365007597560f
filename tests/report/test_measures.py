# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import numpy as np

from fedblend.report.measures import (
    curve_metrics,
    curves,
    list_metrics,
    main_splits,
)


def test_a_curve_is_the_mean_over_seeds_with_their_range(rows):
    curve = curves(rows, "test", "accuracy")["personal"]
    # Over clients 0.8 + 0.015, and 0.01 a round; the second seed is 0.001 above.
    np.testing.assert_array_equal(curve.rounds, [0, 2, 4])
    np.testing.assert_allclose(curve.mean, 0.8155 + np.array([0, 0.02, 0.04]))
    np.testing.assert_allclose(curve.high - curve.low, 0.001)
    np.testing.assert_array_equal(curve.bits, [0, 6000, 12000])


def test_only_rounds_that_all_seeds_have_are_drawn(rows):
    curve = curves(rows[:-1], "test", "accuracy")["shared"]
    np.testing.assert_array_equal(curve.rounds, [0, 2])


def test_a_missing_value_is_a_gap(rows):
    rows[2]["measures"]["test"]["personal"]["loss"]["mean"] = None
    curve = curves(rows, "test", "loss")["personal"]
    np.testing.assert_array_equal(np.isnan(curve.mean), [False, True, False])


def test_models_that_were_not_measured_have_no_curve(make_row):
    rows = [make_row(number, models=("personal",)) for number in (0, 1)]
    assert list(curves(rows, "test", "accuracy")) == ["personal"]


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
    assert curve_metrics(rows, "test") == ["recall@5", "loss"]

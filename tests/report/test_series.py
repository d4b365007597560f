# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from fedblend.report.series import all_gains, curves, shown_metrics, shown_splits


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
    assert shown_splits(rows) == ["test"]
    assert shown_metrics(rows, "test") == ["accuracy", "loss"]
    for row in rows:
        del row["measures"]["test"]
    assert shown_splits(rows) == ["train"]


def test_numbered_metrics_are_of_their_kind(rows):
    for models in rows[-1]["measures"]["test"].values():
        models["recall@5"] = models.pop("accuracy")
    assert shown_metrics(rows, "test") == ["recall@5", "loss"]


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_gain_is_an_improvement_whichever_way_is_better(evidence, metric):
    (gained,) = all_gains(evidence, "test", metric)
    np.testing.assert_allclose(gained.gain.value, [0.4, 0, -0.25, 0.1], atol=1e-12)
    assert (gained.reference, gained.seeds) == ("local", 2)


def test_without_another_model_there_are_no_gains(evidence):
    for replica in evidence.measured:
        replica["test"].pop("local", None)
    assert all_gains(evidence, "test", "accuracy") == []
    assert all_gains(evidence._replace(measured=[]), "test", "accuracy") == []


def test_one_model_for_all_gains_nothing_over_itself(evidence):
    for replica in evidence.measured:
        replica["test"]["local"] = replica["test"]["personal"]
    assert all_gains(evidence, "test", "accuracy") == []


def test_models_that_are_nowhere_finite_are_not_taken_for_one(evidence):
    nothing = {name: np.full(4, np.nan) for name in ("accuracy", "loss")}
    replica = {"test": {"personal": nothing, "local": nothing}}
    (gained,) = all_gains(evidence._replace(measured=[replica]), "test", "accuracy")
    assert gained.gain.not_finite.all()

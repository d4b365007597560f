# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who gains and who is harmed."""

import numpy as np
import pytest

from fedblend.report.harm import Clients, compared, harm_rows, plot_harm, sentence

NAN = float("nan")
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
    test=np.array([3, 4, 5, 0]),
    alpha=np.array([0.1, 0.5, 0.9, 1.0]),
)


@pytest.fixture
def found():
    answer = compared(LOSSES, "test", "loss")
    assert answer is not None
    return answer


def test_a_smaller_loss_is_a_gain(found):
    np.testing.assert_allclose(found.gains["local"], [-0.1, 0.5, 0.1, NAN])
    np.testing.assert_allclose(found.gains["shared"], [0.5, -0.5, 0.0, NAN])


def test_of_accuracies_more_is_a_gain():
    measured = {
        "test": {
            "personal": {"accuracy": np.array([0.9])},
            "local": {"accuracy": np.array([0.7])},
        }
    }
    answer = compared(measured, "test", "accuracy")
    assert answer is not None
    assert answer.gains["local"] == pytest.approx([0.2])


def test_the_most_harmed_come_first(found):
    rows = harm_rows(found, CLIENTS)
    assert [row["name"] for row in rows] == ["b", "a", "c", "d"]
    assert rows[0] == {
        "id": 5,
        "name": "b",
        "train": 20,
        "test": 4,
        "alpha": 0.5,
        "shared_loss": 1.5,
        "local_loss": 2.5,
        "personal_loss": 2.0,
        "gain_over_local": 0.5,
        "gain_over_shared": -0.5,
        "harm": 0.5,
    }
    assert rows[-1]["harm"] == rows[-1]["personal_loss"] == ""


def test_one_model_for_all_has_nothing_to_compare_with():
    same = {"loss": np.array([1.0, NAN])}
    assert (
        compared({"test": {"personal": same, "shared": same}}, "test", "loss") is None
    )
    assert compared({}, "test", "loss") is None


def test_in_words(found):
    assert sentence(found) == (
        "test loss: 1 of 3 clients do worse than by training alone, by 0.1 on average "
        "and 0.1 at worst; 1 of 3 clients do worse than with the shared model, by 0.5 "
        "on average and 0.5 at worst"
    )


def test_figures(found, tmp_path):
    written = plot_harm(found, CLIENTS, tmp_path / "harm")
    assert [path.name for path in written] == ["harm.png", "harm.svg"]
    without = plot_harm(found, CLIENTS._replace(alpha=None), tmp_path / "two")
    assert written[0].stat().st_size > without[0].stat().st_size

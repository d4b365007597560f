# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Linear models drawn at random, against what the papers say of them."""

import numpy as np
import pytest

from fedblend.data.datasets import load
from fedblend.data.partition import by_key
from fedblend.errors import UserError
from fedblend_reproductions.datasets import synthetic


def client_means(dataset):
    rows = by_key(dataset.keys).rows
    return np.array([dataset.rows[0][index].mean(axis=0) for index in rows])


def test_synthetic_shape():
    dataset = load("synthetic", gamma=0.5, beta=0.5)
    partition = by_key(dataset.keys)
    assert len(partition) == 100
    assert partition.counts.min() >= 500
    assert partition.counts.max() == 1000
    assert len(np.unique(partition.counts)) > 20
    assert dataset.rows[0].shape[1] == 60
    assert dataset.outputs == 10
    assert set(np.unique(dataset.rows[1])) == set(range(10))


def test_synthetic_inputs_have_the_stated_spread():
    dataset = synthetic(0.0, 1.0, clients=400, dim=20)
    within = [dataset.rows[0][index].var(axis=0) for index in by_key(dataset.keys)]
    expected = np.arange(1, 21) ** -1.2
    # 400 clients x 500 rows: the standard error of a variance is about 0.3 %
    np.testing.assert_allclose(np.mean(within, axis=0), expected, rtol=0.015)


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_beta_spreads_the_clients_inputs(beta):
    means = client_means(synthetic(0.0, beta, clients=400, dim=40))
    # The mean over k of nu_i is V_i plus noise of variance 1/40.
    spread = means.mean(axis=1).var()
    expected = beta**2 + 1 / 40
    assert abs(spread - expected) < 5 * expected * np.sqrt(2 / 400)


def test_gamma_needs_a_number_for_each_class():
    """One number for all classes adds the same to all scores: no label changes."""
    low, high = (synthetic(gamma, 0.0, clients=50, dim=10) for gamma in (0.0, 3.0))
    np.testing.assert_array_equal(low.rows[0], high.rows[0])
    assert (low.rows[1] == high.rows[1]).mean() > 0.999
    low, high = (
        synthetic(gamma, 0.0, clients=50, dim=10, by_class=True) for gamma in (0.0, 3.0)
    )
    np.testing.assert_array_equal(low.rows[0], high.rows[0])
    assert (low.rows[1] == high.rows[1]).mean() < 0.7


def test_synthetic_labels_come_from_one_linear_model_per_client():
    dataset = synthetic(1.0, 1.0, clients=3, dim=5, classes=2, seed=4)
    assert (dataset.kind, dataset.outputs) == ("binary", 1)
    for index in by_key(dataset.keys):
        x, y = dataset.rows[0][index], dataset.rows[1][index]
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        x = np.where(y[:, None] > 0, x, -x)
        weights = np.zeros(6)
        for _ in range(2000):  # the perceptron ends where data are separable
            wrong = x @ weights <= 0
            if not wrong.any():
                break
            weights += x[wrong].mean(axis=0)
        assert (x @ weights <= 0).mean() < 0.01


def test_the_seed_decides():
    one, again, other = (
        synthetic(1.0, 1.0, clients=3, seed=seed).rows[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, again)
    assert one.shape != other.shape or (one != other).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -1.0}, "gamma: -1.0 is not"),
        ({"classes": 1}, "classes: 1 is not a whole number"),
        ({"most": 499}, "most: 499 is not at least 500"),
    ],
)
def test_errors_are_one_clear_line(options, message):
    with pytest.raises(UserError, match=message) as error:
        synthetic(**{"gamma": 0.0, "beta": 0.0} | options)
    assert "\n" not in str(error.value)

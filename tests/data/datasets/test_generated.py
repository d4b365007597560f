# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Datasets that need no files: built in, or drawn at random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedblend.data.dataset import DataError
from fedblend.data.datasets import (
    DATASETS,
    load,
    quadratic_loss,
    quadratics,
    synthetic,
)
from fedblend.data.partition import by_key
from fedblend.errors import UserError


def test_digits():
    dataset = load("digits")
    assert dataset.rows[0].shape == (1797, 8, 8, 1)
    assert dataset.rows[0].dtype == np.float32
    assert (dataset.rows[0].min(), dataset.rows[0].max()) == (0, 1)
    assert dataset.outputs == 10


def test_breast_cancer():
    dataset = load("breast_cancer")
    inputs, targets = dataset.rows
    np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(inputs.std(axis=0), 1, atol=1e-5)
    assert np.bincount(targets).tolist() == [212, 357]
    assert dataset.label_names == ("malignant", "benign")


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


@pytest.mark.parametrize(("rows", "clients"), [(1, 5), (4, 3)])
def test_quadratics(rows, clients):
    federated_data, optimum = quadratics(clients, 6, seed=2, condition=50.0, rows=rows)
    matrices, vectors = federated_data.train.examples
    assert federated_data.train.counts.tolist() == [rows] * clients
    eigenvalues = np.linalg.eigvalsh(matrices)
    np.testing.assert_allclose(eigenvalues[:, 0], 1)
    np.testing.assert_allclose(eigenvalues[:, -1], 50)
    at_optimum = matrices.mean(axis=0) @ optimum - vectors.mean(axis=0)
    np.testing.assert_allclose(at_optimum, 0, atol=1e-12)
    at = jnp.asarray(optimum, jnp.float32)
    losses = quadratic_loss(at, federated_data.train.examples)
    expected = [
        0.5 * optimum @ a @ optimum - b @ optimum
        for a, b in zip(matrices, vectors, strict=True)
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    assert losses.dtype == jnp.float32
    gradient = jax.grad(lambda x: quadratic_loss(x, (matrices, vectors)).mean())(at)
    np.testing.assert_allclose(gradient, 0, atol=1e-5)


@pytest.mark.parametrize(
    "build",
    [
        lambda seed: synthetic(1.0, 1.0, clients=3, seed=seed).rows[0],
        lambda seed: quadratics(2, 3, seed=seed)[1],
    ],
)
def test_the_seed_decides(build):
    np.testing.assert_array_equal(build(1), build(1))
    first, second = build(1), build(2)
    assert first.shape != second.shape or (first != second).any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: load("mnits"), "dataset: 'mnits' is unknown; did you mean 'mnist'"),
        (lambda: load("zzz"), "known are a6a, breast_cancer"),
        (lambda: load("mnist", writer=True), "mnist: no option 'writer'; .*'writers'"),
        (lambda: load("digits", size=3), "digits: no option 'size'"),
        (lambda: load("synthetic", gamma=1.0), "the option 'beta' must be given"),
        (lambda: load("synthetic", gamma="1", beta=1.0), "gamma: '1' is not a number"),
        (lambda: synthetic(-1.0, 0.0), "gamma: -1.0 is not"),
        (
            lambda: synthetic(0.0, 0.0, classes=1),
            "classes: 1 is not a whole number",
        ),
        (lambda: synthetic(0.0, 0.0, most=499), "most: 499 is not at least 500"),
        (lambda: quadratics(0, 3), "clients: 0"),
        (lambda: quadratics(3, 3, condition=0.5), "condition: 0.5"),
    ],
)
def test_errors_are_one_clear_line(build, message):
    with pytest.raises((DataError, UserError), match=message) as error:
        build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_dataset_is_described(name):
    info = DATASETS[name]
    assert info.summary
    assert info.license
    assert "\n" not in info.summary + info.license

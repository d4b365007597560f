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
)
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
        (lambda: load("femnist", files="x"), "femnist: no option 'files'; .*'file'"),
        (lambda: load("digits", size=3), "digits: no option 'size'"),
        (lambda: load("synthetic", gamma=1.0), "the option 'beta' must be given"),
        (lambda: load("synthetic", gamma="1", beta=1.0), "gamma: '1' is not a number"),
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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of a few common linear models, against what was drawn."""

import numpy as np
import pytest

from fedblend.data.dataset import generator
from fedblend.data.partition import by_key
from fedblend.errors import UserError
from fedblend_reproductions.datasets import synthetic_mixture

MIXED = {"clients": 40, "dim": 20, "test_points": 2000, "noise": 0.0}


def drawn_models(clients, dim):
    """The weights of clients and the common models, which are drawn after the sizes."""
    rng = generator(0, "synthetic mixture")
    rng.lognormal(4, 2, clients)
    return rng.dirichlet(np.full(3, 0.4), clients), rng.uniform(-1, 1, (3, dim))


def test_rows_of_a_synthetic_mixture_follow_the_common_models_by_weight():
    dataset = synthetic_mixture(**MIXED)
    counts = by_key(dataset.keys).counts
    assert counts.min() >= 50 and counts.max() == 1000 and len(set(counts)) > 15
    assert np.abs(dataset.rows[0]).max() <= 1
    assert dataset.test_rows is not None
    weights, thetas = drawn_models(40, 20)
    inputs, targets = (part.reshape(40, 2000, -1) for part in dataset.test_rows)
    labels = inputs @ thetas.T > 0
    right = (labels == targets).mean(axis=1)  # by each model alone
    alike = (labels[..., None] == labels[..., None, :]).mean(axis=1)
    wanted = np.einsum("ik,imk->im", weights, alike)
    # A fraction of 2,000 rows has a standard deviation of at most 0.011.
    np.testing.assert_allclose(right, wanted, atol=0.05)
    assert (labels == targets).any(axis=2).all()


def test_a_synthetic_mixture_as_in_the_code_has_zeros_behind_the_largest_part():
    dataset = synthetic_mixture(**MIXED, as_in_code=True)
    assert dataset.test_rows is not None
    weights, _ = drawn_models(40, 20)
    targets = dataset.test_rows[1].reshape(40, 2000)
    np.testing.assert_allclose(targets.mean(axis=1), weights.max(axis=1) / 2, atol=0.05)
    ends = [np.flatnonzero(row).max() / 2000 for row in targets]
    np.testing.assert_allclose(ends, weights.max(axis=1), atol=0.05)


def test_the_seed_decides():
    first, again, other = (
        synthetic_mixture(3, dim=2, test_points=1, seed=seed).rows[1]
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or (first != other).any()


def test_errors_are_one_clear_line():
    with pytest.raises(UserError, match="most: 8 is not at least 9"):
        synthetic_mixture(least=9, most=8)
    with pytest.raises(UserError, match=r"alpha: 0\.0 is not a number above 0"):
        synthetic_mixture(alpha=0.0)

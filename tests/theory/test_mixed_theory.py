# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL in numbers, on quadratics where they are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.theory import mixed_fl
from fedblend.trees import precision

COUNTS = (1, 4, 2)
LOSS = fb.datasets.quadratic_loss


@pytest.fixture(scope="module")
def problem():
    draws = np.random.default_rng(0)
    total = sum(COUNTS)
    rows = np.stack([np.eye(2)] * total), draws.normal(size=(total, 2))
    edges = np.cumsum((0, *COUNTS))
    parts = [np.arange(edges[i], edges[i + 1]) for i in range(len(COUNTS))]
    own = np.stack([np.eye(2)] * 5), draws.normal(size=(5, 2)) + 3
    return fb.federate(rows, parts), own


def test_the_federated_gradient_is_that_of_all_rows_together(problem):
    federated_data, _ = problem
    with precision("float64"):
        gradient = mixed_fl.federated_gradient(
            LOSS, jnp.ones(2), federated_data, chunk=2
        )
    wanted = 1 - federated_data.train.examples[1].mean(0)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_clients_may_weigh_alike_and_all_rows_make_no_noise(problem):
    federated_data, own = problem
    alike = np.ones(len(COUNTS))
    rows = [federated_data.train.rows(client)[1] for client in range(len(COUNTS))]
    wanted = 1 - np.mean([part.mean(0) for part in rows], axis=0)
    with precision("float64"):
        gradient = mixed_fl.federated_gradient(
            LOSS, jnp.ones(2), federated_data, weights=alike
        )
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-12)
        found = mixed_fl.noise(
            LOSS,
            jnp.ones(2),
            federated_data,
            jax.random.key(0),
            batch_size=None,
            central=fb.shard_of(own),
            central_loss=LOSS,
            central_batch=None,
            weights=np.array([0.0, 1.0, 0.0]),
        )
        np.testing.assert_allclose(found, (0, 0), atol=1e-12)


def test_disagreement_by_its_formulas():
    draws = np.random.default_rng(1)
    federated, central = draws.normal(size=(2, 5))
    weights = (0.7, 0.3)
    g_f, g_c = 0.7 * federated, 0.3 * central
    apart = g_f @ g_f / 0.7 + g_c @ g_c / 0.3
    whole = (g_f + g_c) @ (g_f + g_c)
    with precision("float64"):
        found = mixed_fl.disagreement(
            jnp.asarray(federated), jnp.asarray(central), weights
        )
        wanted = apart - whole, apart / whole, whole
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_noise_is_the_variance_of_rows(problem):
    federated_data, own = problem
    with precision("float64"):
        found = mixed_fl.noise(
            LOSS,
            jnp.zeros(2),
            federated_data,
            jax.random.key(0),
            batch_size=1,
            central=fb.shard_of(own),
            central_loss=LOSS,
            central_batch=2,
            draws=4000,
        )
    rows = federated_data.train.examples[1]
    spread = ((rows - rows.mean(0)) ** 2).sum(axis=1)
    error = 4 * spread.std() / np.sqrt(4000)
    assert found.clients == pytest.approx(spread.mean(), abs=error)
    central = ((own[1] - own[1].mean(0)) ** 2).sum(axis=1).mean()
    assert found.central == pytest.approx(central / 2, rel=0.15)


def test_limits():
    assert mixed_fl.limit("one_way", 2.0, convex=True) == 1 / 16
    assert mixed_fl.limit("one_way", 2.0, convex=False) == 1 / 36
    assert mixed_fl.limit("two_way", 1.0, convex=True) == pytest.approx(1 / 81)
    assert mixed_fl.limit("two_way", 1.0, convex=False) == 1 / 24
    assert mixed_fl.limit("two_way", 0.01, convex=True, strong=2.0) == 1 / 30
    with pytest.raises(ValueError, match="needs ratio"):
        mixed_fl.limit("parallel", 1.0, convex=True)
    with pytest.raises(ValueError, match="how: 'both'"):
        mixed_fl.limit("both", 1.0, convex=True)

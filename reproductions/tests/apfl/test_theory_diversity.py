# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How far clients are from each other, against closed forms on quadratics."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.trees import precision
from fedblend_reproductions.apfl import theory as apfl
from fedblend_reproductions.clients import map_clients

POINTS = np.random.default_rng(0).standard_normal((3, 3))


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_gradients_of_quadratics(chunk):
    on = problems.quadratics()
    A, b = problems.client_matrices(on)
    gradients = np.einsum("nij,pj->pni", A, POINTS) - b
    gaps = gradients - gradients.mean(axis=1, keepdims=True)
    with precision("float64"):
        found = apfl.gradient_diversity(
            on.loss, jnp.asarray(POINTS), on.federated_data, chunk=chunk
        )
    exact = (gaps**2).sum(axis=2).max(axis=0)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-10)
    assert len(np.unique((gaps**2).sum(axis=2).argmax(axis=0))) > 1


def test_where_curvatures_agree_one_point_has_the_supremum():
    on = problems.means()
    _, b = problems.client_matrices(on)
    with precision("float64"):
        found = apfl.gradient_diversity(
            on.loss, jnp.full((1, 2), 9.0), on.federated_data
        )
    exact = ((b - b.mean(axis=0)) ** 2).sum(axis=1)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-10)


def test_trees_of_parameters():
    """All entries of all leaves count, by gradients that NumPy writes."""
    on = problems.classes()
    params = problems.Linear(jnp.ones((1, 2, 3)) / 7, jnp.ones((1, 3)) * 0.3)
    gradients = []
    for client in range(on.federated_data.clients):
        inputs, labels = on.federated_data.train.rows(client)
        scores = inputs @ np.ones((2, 3)) / 7 + 0.3
        chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        wrong = (chances - np.eye(3)[labels]) / len(labels)
        gradients.append(np.append((inputs.T @ wrong).ravel(), wrong.sum(axis=0)))
    gaps = np.stack(gradients) - np.mean(gradients, axis=0)
    found = apfl.gradient_diversity(on.loss, params, on.federated_data)
    np.testing.assert_allclose(found, (gaps**2).sum(axis=1), rtol=1e-5)


def test_distances_of_minimizers():
    """Two ways to Delta_i: the models, and solving the equations of their gap."""
    on = problems.quadratics()
    A, b = problems.client_matrices(on)
    shared = problems.optimum(on)
    personal = np.stack([np.linalg.solve(*pair) for pair in zip(A, b, strict=True)])
    gaps = [np.linalg.solve(a, v - a @ shared) for a, v in zip(A, b, strict=True)]
    found = apfl.model_distances(personal, shared)
    np.testing.assert_allclose(found, (np.stack(gaps) ** 2).sum(axis=1), atol=1e-10)


def test_distances_of_trees():
    shared = {"w": jnp.ones((2, 2)), "b": jnp.zeros(3)}
    personal = {"w": jnp.zeros((5, 2, 2)), "b": jnp.full((5, 3), 2.0)}
    found = apfl.model_distances(personal, shared)
    np.testing.assert_array_equal(found, np.full(5, 4.0 + 12.0))


def test_a_group_of_nobody_is_refused():
    federated_data, _ = fb.datasets.quadratics(clients=2, dim=2)
    with pytest.raises(ValueError, match="chunk: 0 is not a whole number of"):
        map_clients(lambda shard: shard.id, federated_data.train, chunk=0)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where the methods end on heterogeneous quadratics, in closed form.

K steps of rate eta on ``1/2 x^T A x - b^T x`` from x move x by ``-(I - J^K) A^-1
(A x - b)`` with ``J = I - eta A``; the fixed point of their mean is a linear solve.
"""

from typing import Any

import jax
import numpy as np
import pytest

import fedblend as fb
import problems

RATE, STEPS, MU = 0.25, 10, 0.8
on = problems.quadratics()
COUNTS = on.federated_data.train.counts
LIMIT: dict[str, Any] = {"rtol": 0, "atol": 3e-6}
"""Float32 at a fixed point of size 1, contracted by a half every round."""
AWAY = 1e-2
"""Drift that no rounding could explain."""


def end(algorithm, weights, rounds=300, cohort=None):
    run = fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        jax.random.key(0),
        rounds=rounds,
        every=rounds,
        cohort=cohort,
        weights=weights,
        chunk=7,
    )
    return run.complete()


def shares(weights):
    values = COUNTS if weights == "by_count" else np.ones(7)
    return values / values.sum()


def fixed_point(weights, pull):
    """Where the mean of the clients' moves is zero."""
    matrices, vectors = problems.client_matrices(on)
    one = np.eye(3)
    left, right = np.zeros((3, 3)), np.zeros(3)
    for share, a, b in zip(shares(weights), matrices, vectors, strict=True):
        curved = a + pull * one
        decay = np.linalg.matrix_power(one - RATE * curved, STEPS)
        move = share * (one - decay) @ np.linalg.inv(curved)
        left += move @ a
        right += move @ b
    return np.linalg.solve(left, right)


each_weights = pytest.mark.parametrize("weights", ["by_count", "uniform"])
work: dict[str, Any] = {"steps": STEPS, "batch_size": None}


@each_weights
def test_fedavg_ends_at_its_own_fixed_point_and_not_at_the_optimum(weights):
    reached = end(fb.fedavg(on.loss, fb.Work(RATE, **work)), weights).shared
    np.testing.assert_allclose(reached, fixed_point(weights, 0.0), **LIMIT)
    assert np.abs(reached - problems.optimum(on, weights)).max() > AWAY


@each_weights
def test_fedprox_ends_between_fedavg_and_the_optimum(weights):
    reached = end(
        fb.algorithms.fedprox(on.loss, fb.Work(RATE, **work), mu=MU), weights
    ).shared
    np.testing.assert_allclose(reached, fixed_point(weights, MU), **LIMIT)
    best = problems.optimum(on, weights)
    drift = np.linalg.norm(reached - best)
    assert AWAY / 10 < drift < np.linalg.norm(fixed_point(weights, 0.0) - best)


@each_weights
def test_scaffold_ends_at_the_optimum_with_many_local_steps(weights):
    done = end(fb.scaffold(on.loss, fb.Work(RATE, **work)), weights)
    best = problems.optimum(on, weights)
    np.testing.assert_allclose(done.shared, best, **LIMIT)
    matrices, vectors = problems.client_matrices(on)
    for client in range(7):
        mean_gradient = matrices[client] @ best - vectors[client]
        np.testing.assert_allclose(
            done.client(client).control, mean_gradient, rtol=0, atol=1e-5
        )


@each_weights
def test_scaffold_ends_at_the_optimum_with_some_clients_at_a_time(weights):
    done = end(
        fb.scaffold(on.loss, fb.Work(RATE, **work)), weights, rounds=600, cohort=3
    )
    np.testing.assert_allclose(done.shared, problems.optimum(on, weights), **LIMIT)


def test_one_step_of_fedavg_ends_at_the_optimum():
    algorithm = fb.fedavg(on.loss, fb.Work(RATE, steps=1, batch_size=None))
    reached = end(algorithm, "by_count").shared
    np.testing.assert_allclose(reached, problems.optimum(on, "by_count"), **LIMIT)


def test_local_only_ends_at_every_clients_own_optimum():
    done = end(fb.local_only(on.loss, fb.Work(RATE, **work)), "by_count", rounds=40)
    matrices, vectors = problems.client_matrices(on)
    for client in range(7):
        own = np.linalg.solve(matrices[client], vectors[client])
        np.testing.assert_allclose(done.personal(client), own, rtol=0, atol=1e-5)


def test_means_are_averaged_by_count():
    """With curvature 1 everywhere the fixed point is the mean of all rows."""
    same = problems.means()
    run = fb.simulate(
        fb.fedavg(same.loss, fb.Work(0.5, steps=3, batch_size=None)),
        same.params,
        same.federated_data,
        jax.random.key(0),
        rounds=40,
        every=40,
    )
    rows = same.federated_data.train.examples[1]
    np.testing.assert_allclose(run.complete().shared, rows.mean(axis=0), **LIMIT)

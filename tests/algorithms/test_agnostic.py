# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Agnostic FL: the projection, the minimax point, and what the server hears."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.algorithms.agnostic import onto_simplex
from fedblend.core import Sender
from fedblend.data.datasets.built_in import quadratic_loss

KEY = jax.random.key(0)
on = problems.quadratics()
FULL: dict[str, Any] = {"steps": 1, "batch_size": None}
CENTRES = np.array([[2.0, 1.0], [-1.0, 0.5], [0.0, 2.0]])


def by_bisection(vector):
    """max(v - shift, 0), with the shift at which the entries add up to 1."""
    low, high = vector.min() - 1, vector.max()
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(vector - middle, 0).sum() > 1:
            low = middle
        else:
            high = middle
    return np.maximum(vector - high, 0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_projection_is_the_nearest_point_of_the_simplex(scale):
    rng = np.random.default_rng(1)
    vectors = scale * rng.standard_normal((20, 6))
    for vector, found in zip(
        vectors, jax.vmap(onto_simplex)(jnp.asarray(vectors, jnp.float32)), strict=True
    ):
        np.testing.assert_allclose(
            found, by_bisection(vector), atol=1e-6 * scale + 1e-6
        )
        assert (found >= 0).all()
        assert abs(float(found.sum()) - 1) < 1e-5


def test_the_projection_leaves_the_simplex_as_it_is():
    for inside in ([0.25, 0.75, 0.0], [1.0, 0.0, 0.0], [1.0]):
        vector = jnp.asarray(inside, jnp.float32)
        np.testing.assert_array_equal(onto_simplex(vector), vector)
    np.testing.assert_allclose(onto_simplex(jnp.full(4, 9.0)), 0.25)


def three_centers():
    """f_i(x) = 1/2 |x|^2 - c_i x: one row for each of three clients."""
    rows = (np.broadcast_to(np.eye(2), (3, 2, 2)), CENTRES)
    return fb.federate(rows, np.split(np.arange(3), 3))


def test_it_ends_at_the_minimax_point():
    """f_1 = f_2 where (c_1 - c_2) x = 0, on the line x = q c_1 + (1 - q) c_2.

    The third client's loss is smaller there, so that its weight is 0.
    """
    apart = CENTRES[0] - CENTRES[1]
    q = -(apart @ CENTRES[1]) / (apart @ apart)
    wanted = q * CENTRES[0] + (1 - q) * CENTRES[1]
    losses = wanted @ wanted / 2 - CENTRES @ wanted
    assert 0 < q < 1
    assert abs(losses[0] - losses[1]) < 1e-12
    assert losses[2] < losses[0] - 0.05
    run = fb.simulate(
        fb.algorithms.agnostic(
            quadratic_loss, fb.Work(0.1, **FULL), clients=3, q_rate=0.05
        ),
        jnp.ones(2, jnp.float32),
        three_centers(),
        KEY,
        rounds=1500,
        every=100,
    )
    for _ in run:
        assert (run.down.extra["agnostic"] >= 0).all()
        assert abs(float(run.down.extra["agnostic"].sum()) - 1) < 1e-6
    np.testing.assert_allclose(run.shared, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        run.down.extra["agnostic"], [q, 1 - q, 0], rtol=0, atol=1e-5
    )
    assert np.abs(run.shared - CENTRES.mean(axis=0)).max() > 0.1


def test_with_a_still_q_it_is_fedavg_and_the_rest_is_counted():
    work: dict[str, Any] = {"steps": 3, "batch_size": None}
    still = fb.algorithms.agnostic(on.loss, fb.Work(0.2, **work), clients=7, q_rate=0.0)
    plain = fb.fedavg(on.loss, fb.Work(0.2, **work))
    one, two = (
        fb.simulate(
            algorithm,
            on.params,
            on.federated_data,
            KEY,
            rounds=4,
            cohort=3,
            weights="uniform",
        ).complete()
        for algorithm in (still, plain)
    )
    np.testing.assert_allclose(one.shared, two.shared, rtol=1e-5, atol=1e-6)
    sizes, fewer = one.message_bits, two.message_bits
    assert sizes.up == fewer.up + 32  # a loss; whose it is, the server knows
    assert sizes.down == fewer.down + 32  # its own q


def test_what_is_heard_is_unbiased_over_cohorts():
    """The mean over all cohorts of two is what all seven say."""
    algorithm = fb.algorithms.agnostic(
        on.loss, fb.Work(0.2, **FULL), clients=7, q_rate=0.1
    )
    down, _ = algorithm.start(on.params, fb.Aggregate((), *jnp.ones((2,))), None, KEY)
    aggregate = []
    for client in range(7):
        shard = jax.device_put(on.federated_data.train.shard(client))
        told = algorithm.wire.tell(down, algorithm.wire.ask((), shard))
        up, _ = algorithm.client(told, (), shard, KEY)
        sender = Sender(jnp.int32(client), KEY, down)
        aggregate.append(
            np.asarray(algorithm.wire.decode(up, sender).extra["agnostic"])
        )
    matrices, vectors = problems.client_matrices(on)
    x = np.asarray(on.params)
    losses = np.einsum("i,nij,j->n", x, matrices, x) / 2 - vectors @ x
    np.testing.assert_allclose(np.mean(aggregate, axis=0), losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(np.stack(aggregate), np.diag(np.diag(aggregate)))


def test_weight_and_nudge_reach_the_answer():
    push = jnp.asarray([0.3, -0.2, 0.1], jnp.float32)
    shard = jax.device_put(on.federated_data.train.shard(4))
    algorithm = fb.algorithms.agnostic(
        on.loss, fb.Work(0.2, **FULL), clients=7, q_rate=0.1
    )
    own = {"agnostic": jnp.float32(0.3)}
    down = fb.Down(on.params, jnp.zeros((), jnp.int32), push, own)
    up: Any = algorithm.client(down, (), shard, KEY)[0]
    matrices, vectors = problems.client_matrices(on)
    mean_gradient = matrices[4] @ np.asarray(on.params) - vectors[4]
    np.testing.assert_allclose(up.mean_gradient, 7 * 0.3 * mean_gradient, rtol=1e-5)
    np.testing.assert_allclose(
        up.delta, -0.2 * 7 * 0.3 * (mean_gradient + push), rtol=1e-5
    )


def test_what_cannot_work_is_refused_in_one_line():
    with pytest.raises(ValueError, match="clients: 0 is not a whole number"):
        fb.algorithms.agnostic(on.loss, fb.Work(0.2, **FULL), clients=0, q_rate=0.1)
    algorithm = fb.algorithms.agnostic(
        on.loss, fb.Work(0.2, **FULL), clients=7, q_rate=0.1
    )
    given = (algorithm, on.params, on.federated_data, KEY)
    with pytest.raises(ValueError, match="it needs 'mean'"):
        fb.simulate(*given, rounds=1, reduction="median")
    with pytest.raises(ValueError, match="needs 'uniform'"):
        fb.simulate(*given, rounds=1, weights="by_count")

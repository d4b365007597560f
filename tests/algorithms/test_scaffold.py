# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: what the controls are, beyond plain SGD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
import problems

on = problems.quadratics()
SHARD = jax.device_put(on.federated_data.train.shard(4))
CONTROL = jnp.asarray([0.3, -0.1, 0.2], jnp.float32)
SERVER = jnp.asarray([-0.2, 0.1, 0.4], jnp.float32)


def visit(optimizer, steps=4):
    """One visit to a client with some controls on both sides."""
    algorithm = fb.scaffold(on.loss, fb.Work(optimizer, steps=steps, batch_size=None))
    key = jax.random.key(0)
    _, state = algorithm.enroll(on.params, SHARD, key)
    aggregate = fb.Aggregate((), jnp.ones(()), jnp.ones((), jnp.int32))
    down, _ = algorithm.start(on.params, aggregate, None, key)
    down = down._replace(extra={"scaffold": SERVER})
    return algorithm.client(down, type(state)(CONTROL), SHARD, key)


def test_with_plain_sgd_the_control_is_the_papers():
    up, state = visit(0.1)
    papers = CONTROL - SERVER - up.delta / (4 * 0.1)
    np.testing.assert_allclose(state.control, papers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1, 0.9)])
def test_with_other_optimizers_the_control_is_the_mean_raw_gradient(optimizer):
    """The steps, taken again by hand, with the gradients kept."""
    _, after = visit(optimizer)
    matrices, vectors = problems.client_matrices(on)
    y, memory, slopes = on.params, optimizer.init(on.params), []
    for _ in range(4):
        mean_gradient = jnp.asarray(
            matrices[4] @ np.asarray(y) - vectors[4], jnp.float32
        )
        slopes.append(mean_gradient)
        updates, memory = optimizer.update(mean_gradient - CONTROL + SERVER, memory, y)
        y = optax.apply_updates(y, updates)
    np.testing.assert_allclose(after.control, np.mean(slopes, 0), rtol=1e-5, atol=1e-6)


def test_the_change_of_the_control_is_what_travels():
    up, state = visit(0.1)
    np.testing.assert_allclose(up.extra["scaffold"], state.control - CONTROL, rtol=1e-6)


def test_the_server_needs_the_mean():
    assert fb.scaffold(on.loss, fb.Work(0.1, steps=1, batch_size=None)).needs.mean

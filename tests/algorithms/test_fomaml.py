# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FOMAML: the gradient after the inner steps, on a batch of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.losses import gradient

on = problems.quadratics()
KEY = jax.random.key(5)
NOISY: dict[str, Any] = {"steps": 3, "batch_size": 2}
SHARD = jax.device_put(on.federated_data.train.shard(4))
DOWN = fb.Down(on.params, jnp.zeros((), jnp.int32))


def run(algorithm, rounds=4):
    return fb.simulate(
        algorithm, on.params, on.federated_data, KEY, rounds=rounds, cohort=4
    ).complete()


def answer(down=DOWN, loss=on.loss, **work) -> Any:
    up, _ = fb.algorithms.fomaml(loss, fb.Work(0.1, **work), 1.0).client(
        down, (), SHARD, KEY
    )
    return up


def test_no_inner_steps_is_distributed_gradient_descent():
    found = run(
        fb.algorithms.fomaml(on.loss, fb.Work(0.1, steps=0, batch_size=None), 0.2)
    )
    wanted = run(fb.fedavg(on.loss, fb.Work(0.2, steps=1, batch_size=None)))
    np.testing.assert_allclose(found.shared, wanted.shared, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.personal(3), found.shared)


def test_a_rate_of_nothing_is_distributed_sgd():
    """Inner steps that do not move; the batch is drawn with the named key."""
    still = fb.algorithms.fomaml(on.loss, fb.Work(0.0, **NOISY), 1.0).client(
        DOWN, (), SHARD, KEY
    )[0]
    np.testing.assert_array_equal(still.delta, answer(steps=0, batch_size=2).delta)


def test_the_answer_is_the_gradient_at_the_adapted_point():
    matrices, vectors = problems.client_matrices(on)
    y = np.asarray(on.params, float)
    for _ in range(3):
        y = y - 0.1 * (matrices[4] @ y - vectors[4])
    up = answer(steps=3, batch_size=None)
    np.testing.assert_allclose(up.delta, vectors[4] - matrices[4] @ y, rtol=1e-4)
    np.testing.assert_array_equal(up.mean_gradient, -up.delta)


def test_the_last_batch_is_none_of_the_inner_ones():
    """With no rate the inner steps' first batch would give their first gradient."""
    _, first = fb.descend(
        gradient(on.loss),
        on.params,
        SHARD,
        KEY,
        work=fb.Work(optimizer=0.0, steps=1, batch_size=2),
    )
    assert not np.allclose(answer(steps=0, batch_size=2).mean_gradient, first)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_nudge_is_a_linear_term_of_the_loss(steps):
    push = jnp.asarray([0.3, -0.2, 0.1], jnp.float32)
    work = {"steps": steps, "batch_size": None}
    nudged = answer(DOWN._replace(correction=push), **work)
    tilted = answer(loss=lambda x, rows: on.loss(x, rows) + x @ push, **work)
    np.testing.assert_allclose(nudged.delta, tilted.delta, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(nudged.delta, -(nudged.mean_gradient + push), rtol=1e-5)


@pytest.mark.slow
def test_it_prepares_for_inner_steps_better_than_fedavg():
    """What it is for: after the same inner steps, the mean loss is the lower one."""
    work: dict[str, Any] = {"steps": 3, "batch_size": None}
    trained = {
        "fomaml": fb.algorithms.fomaml(on.loss, fb.Work(0.05, **work), 0.1),
        "averaged": fb.finetune(
            fb.fedavg(on.loss, fb.Work(0.1, steps=1, batch_size=None)),
            on.loss,
            fb.Work(0.05, **work),
        ),
    }
    means = {}
    for name, algorithm in trained.items():
        done = fb.simulate(
            algorithm, on.params, on.federated_data, KEY, rounds=150, every=150
        ).complete()
        counts = on.federated_data.train.counts
        losses = [
            float(on.loss(done.personal(i), on.federated_data.train.rows(i)).mean())
            for i in range(7)
        ]
        means[name] = np.average(losses, weights=counts)
    assert means["fomaml"] < means["averaged"]

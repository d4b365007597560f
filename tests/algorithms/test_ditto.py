# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Ditto: the shared model is the wrapped one's; v_i from training alone to shared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend import keys

on = problems.quadratics()
KEY = jax.random.key(6)
SHARD = jax.device_put(on.federated_data.train.shard(4))
TOLD = fb.Down(on.params, jnp.zeros((), jnp.int32))
full: dict[str, Any] = {"steps": 1, "batch_size": None}
noisy: dict[str, Any] = {"steps": 3, "batch_size": 2}


def same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_around_scaffold_the_controls_are_scaffolds():
    inner = fb.scaffold(on.loss, fb.Work(0.2, **noisy))
    algorithm = fb.ditto(inner, on.loss, fb.Work(0.1, **noisy), lam=0.5)
    told = TOLD._replace(extra={"scaffold": jnp.ones_like(on.params)})
    _, state = inner.enroll(on.params, SHARD, KEY)
    _, both = algorithm.enroll(on.params, SHARD, KEY)

    @jax.jit
    def visits():
        ours = algorithm.client(told, both, SHARD, KEY)
        return ours, inner.client(told, state, SHARD, KEY)

    (our_up, our_after), theirs = visits()
    same_bits((our_up, our_after.inner), theirs)


def test_without_a_pull_it_is_training_alone():
    """On the same batches: those of Ditto have a name of their own."""
    alone = fb.local_only(on.loss, fb.Work(0.2, **noisy))
    algorithm = fb.ditto(
        fb.fedavg(on.loss, fb.Work(0.9, **full)),
        on.loss,
        fb.Work(0.2, **noisy),
        lam=0.0,
    )
    _, own = alone.enroll(on.params, SHARD, KEY)
    _, both = algorithm.enroll(on.params, SHARD, KEY)

    @jax.jit
    def visits(own, both, key):
        _, both = algorithm.client(TOLD, both, SHARD, key)
        _, own = alone.client(TOLD, own, SHARD, keys.named(key, "ditto"))
        return own, both

    for number in range(2):
        own, both = visits(own, both, jax.random.fold_in(KEY, number))
        same_bits(own.personal, both.personal)
    assert np.abs(own.personal - on.params).max() > 0.1


def test_a_strong_pull_brings_the_shared_model():
    """v = shared - grad/lam + ..., so the gap falls as 1/lam."""
    with jax.enable_x64(True):
        shared = jnp.asarray([2.0, -1.0, 0.5], jnp.float64)
        told = TOLD._replace(shared=shared)

        @jax.jit
        def visit(lam):
            inner = fb.fedavg(on.loss, fb.Work(0.1, **full))
            algorithm = fb.ditto(
                inner,
                on.loss,
                fb.Work(1 / (lam + 2), steps=30, batch_size=None),
                lam=lam,
            )
            start = jnp.zeros_like(shared)
            _, state = algorithm.enroll(start, SHARD, KEY)
            return algorithm.client(told, state, SHARD, KEY)[1].personal

        gaps = [np.abs(visit(lam) - shared).max() for lam in (1e2, 1e4)]
    np.testing.assert_allclose(gaps[1], gaps[0] / 100, rtol=0.1)
    assert 1e-6 < gaps[1] < 1e-3


def test_it_ends_between_each_clients_optimum_and_the_shared_one():
    """v_i = (A_i + lam_i I)^-1 (A_i x_i + lam_i w), with w FedAvg's optimum."""
    lam = np.array([0.0, 0.1, 0.5, 1.0, 5.0, 20.0, 50.0])
    algorithm = fb.ditto(
        fb.fedavg(on.loss, fb.Work(0.5, **full)),
        on.loss,
        fb.Work(0.03, steps=4, batch_size=None),
        lam=lam,
    )
    done = fb.simulate(
        algorithm, on.params, on.federated_data, KEY, rounds=300, every=300
    ).complete()
    best = problems.optimum(on, "by_count")
    np.testing.assert_allclose(done.shared, best, rtol=0, atol=5e-6)
    matrices, vectors = problems.client_matrices(on)
    for client in range(7):
        held = matrices[client] + lam[client] * np.eye(3)
        wanted = np.linalg.solve(held, vectors[client] + lam[client] * best)
        np.testing.assert_allclose(done.personal(client), wanted, rtol=0, atol=1e-5)
        assert np.abs(wanted - best).max() > 1e-3


def test_an_algorithm_without_a_shared_model_is_refused():
    inner = fb.local_only(on.loss, fb.Work(0.1, **full))
    algorithm = fb.ditto(inner, on.loss, fb.Work(0.1, **full), lam=1.0)
    with pytest.raises(ValueError, match="ditto: the wrapped algorithm broadcasts no"):
        fb.simulate(algorithm, on.params, on.federated_data, KEY, rounds=1)


def test_a_negative_pull_is_refused():
    with pytest.raises(ValueError, match=r"lam: .* is not a number of at least 0"):
        fb.ditto(
            fb.fedavg(on.loss, fb.Work(0.1, **full)),
            on.loss,
            fb.Work(0.1, **full),
            lam=np.array([1.0, -1.0]),
        )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""pFedMe: theta is deployed; the limit of Moreau envelopes; a strong pull is FedAvg."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems

on = problems.quadratics()
KEY = jax.random.key(4)
LAMS = [0.5, 2.0]
RATE = 0.3
PUSH = jnp.asarray([0.3, -0.2, 0.1], jnp.float32)
full: dict[str, Any] = {"steps": 1, "batch_size": None}


@cache
def limits():
    """Both strengths in one sweep; 0.7^60 of the inner error remains, 1e-9."""
    return fb.simulate(
        lambda lam: fb.algorithms.pfedme(
            on.loss, fb.Work(0.4, **full), lam=lam, inner_rate=0.3, inner_steps=60
        ),
        on.params,
        on.federated_data,
        KEY,
        rounds=250,
        every=250,
        weights="uniform",
        over=jnp.asarray(LAMS, jnp.float32),
    ).complete()


@pytest.mark.parametrize("replica", [0, 1])
def test_it_ends_at_the_minimizer_of_the_mean_moreau_envelope(replica):
    """grad F_i(w) = lam (w - theta_i(w)), theta_i(w) = (A + lam I)^-1 (b + lam w)."""
    matrices, vectors = problems.client_matrices(on)
    lam = LAMS[replica]
    near = np.linalg.inv(matrices + lam * np.eye(3))
    left = np.eye(3) - lam * near.mean(axis=0)
    wanted = np.linalg.solve(left, np.einsum("nij,nj->i", near, vectors) / 7)
    np.testing.assert_allclose(limits().shared[replica], wanted, rtol=0, atol=1e-5)
    assert np.abs(wanted - problems.optimum(on)).max() > 1e-3
    for client in range(7):
        theta = near[client] @ (vectors[client] + lam * wanted)
        found = limits().personal(client)[replica]
        np.testing.assert_allclose(found, theta, rtol=0, atol=1e-5)
        assert np.abs(theta - wanted).max() > 1e-2


@cache
def visits(lam=1.5, inner=0.2):
    """Two visits to client 2, without a correction and with PUSH."""
    algorithm = fb.algorithms.pfedme(
        on.loss,
        fb.Work(RATE, steps=2, batch_size=None),
        lam=lam,
        inner_rate=inner,
        inner_steps=3,
    )
    shard = jax.device_put(on.federated_data.train.shard(2))

    @jax.jit
    def visit(correction):
        told = fb.Down(on.params, jnp.zeros((), jnp.int32), correction)
        _, state = algorithm.enroll(on.params, shard, KEY)
        up, state = algorithm.client(told, state, shard, KEY)
        return up, algorithm.personal(told, state, shard, KEY)

    return [visit(correction) for correction in (jnp.zeros_like(PUSH), PUSH)]


@pytest.mark.parametrize("push", [0.0, PUSH])
def test_the_deployed_model_is_theta_and_neither_of_the_other_two(push):
    """By hand: two local steps, each of three inner ones; a correction moves w only."""
    up, deployed = visits()[int(np.any(push))]
    matrices, vectors = problems.client_matrices(on)
    w = theta = np.asarray(on.params, float)
    slopes = []
    for _ in range(2):
        theta = w
        for _ in range(3):
            mean_gradient = matrices[2] @ theta - vectors[2] + 1.5 * (theta - w)
            theta = theta - 0.2 * mean_gradient
        slopes.append(1.5 * (w - theta))
        w = w - RATE * (slopes[-1] + push)
    np.testing.assert_allclose(deployed, theta, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(on.params + up.delta, w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        up.mean_gradient, np.mean(slopes, axis=0), rtol=1e-5, atol=1e-6
    )
    assert np.abs(deployed - w).max() > 1e-2
    assert np.abs(deployed - on.params).max() > 1e-2


def test_a_strong_pull_holds_theta_at_w_and_is_fedavg():
    """theta = w - grad/lam + ..., so both gaps fall as 1/lam."""
    with jax.enable_x64(True):
        shard = jax.device_put(on.federated_data.train.shard(4))
        params = jnp.asarray(on.params, jnp.float64)
        told = fb.Down(params, jnp.zeros((), jnp.int32))

        @jax.jit
        def visit(lam):
            algorithm = fb.algorithms.pfedme(
                on.loss,
                fb.Work(RATE, steps=1, batch_size=2),
                lam=lam,
                inner_rate=1 / (lam + 2),
                inner_steps=20,
            )
            _, state = algorithm.enroll(params, shard, KEY)
            return algorithm.client(told, state, shard, KEY)

        averaged = fb.fedavg(on.loss, fb.Work(RATE, steps=1, batch_size=2))
        delta = averaged.client(told, (), shard, KEY)[0].delta
        gaps = []
        for lam in (1e3, 1e5):
            up, state = visit(lam)
            gaps.append(
                (
                    np.abs(state.personal - params).max(),
                    np.abs(up.delta - delta).max(),
                )
            )
    np.testing.assert_allclose(gaps[1], np.array(gaps[0]) / 100, rtol=0.05)
    assert max(gaps[1]) < 1e-4
    assert np.abs(delta).max() > 0.1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lam": 0.0, "inner_steps": 1}, "lam: 0.0 is not a number above 0"),
        ({"lam": 1.0, "inner_steps": 0}, "inner_steps: 0 is not a whole number"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, line):
    with pytest.raises(ValueError, match=line):
        fb.algorithms.pfedme(on.loss, fb.Work(RATE, **full), inner_rate=0.1, **settings)

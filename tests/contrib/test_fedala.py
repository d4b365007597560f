# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedALA: its paper's loop, and what it is with all weights at one or zero."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.simulation.sampling import cohorts
from reference import family_transcription as paper

KEY, RATE, ROUNDS, COHORT = jax.random.key(2), 0.2, 5, 4
COUNTS = (8, 5, 6, 9, 5, 7)
CLIENTS, DIM = len(COUNTS), 3
on = problems.quadratics(COUNTS)
FULL: dict[str, Any] = {"steps": 2, "batch_size": None}
NOISY: dict[str, Any] = {"steps": 3, "batch_size": 2}


def loss(params, rows):
    return on.loss(jnp.concatenate([params["body"], params["head"]]), rows)


def start(dtype=None):
    whole = np.asarray(on.params, dtype)
    return {"body": jnp.asarray(whole[:1]), "head": jnp.asarray(whole[1:])}


def simulated(algorithm, params, **settings):
    chosen: dict[str, Any] = {"rounds": ROUNDS, "cohort": COHORT} | settings
    run = fb.simulate(algorithm, params, on.federated_data, KEY, **chosen)
    return run.complete()


class Quadratics:
    """The clients' problems in NumPy."""

    clients, counts, weights = CLIENTS, COUNTS, COUNTS

    def gradient(self, i, x, rows):
        matrices, vectors = on.federated_data.train.rows(i)
        total = np.zeros_like(x)
        for row in rows:
            total += matrices[row] @ x - vectors[row]
        return total / len(rows)


def whole(tree):
    return np.concatenate([tree["body"], tree["head"]], axis=-1)


def test_it_is_its_papers_loop():
    """In float64, which rounds at 1e-16: twenty steps stay far below the tolerance."""
    most = 7
    with jax.enable_x64(True):
        algorithm = fb.algorithms.fedala(
            loss, fb.Work(RATE, **FULL), head=["head"], weight_rate=0.8, most=most
        )
        run = simulated(algorithm, start(np.float64))
        members = cohorts(KEY, list(range(ROUNDS)), CLIENTS, COHORT).tolist()
        few = [range(int(0.8 * count)) for count in COUNTS]
        w, own, weights = paper.fedala(
            Quadratics(), np.asarray(on.params, float), members, RATE, 2, 0.8, most,
            (1, 2), few,
        )  # fmt: skip
        states = run.client_states()
        tolerance = {"rtol": 0, "atol": 1e-12}
        np.testing.assert_allclose(whole(run.shared), w, **tolerance)
        np.testing.assert_allclose(whole(states.own), own, **tolerance)
        np.testing.assert_allclose(states.weights["head"], weights[:, 1:], **tolerance)
        assert states.weights["body"] is None
        assert np.ptp(weights) > 0 and (weights < 1).sum() > 3
        np.testing.assert_array_equal(run.personal(1)["head"], states.own["head"][1])


@pytest.mark.slow
def test_weights_that_do_not_move_and_no_weights_are_fedavg():
    """``own + 1 (shared - own)`` is the shared model up to rounding."""
    work = fb.Work(RATE, **NOISY)
    plain = simulated(fb.fedavg(loss, work), start())
    cases: tuple[dict[str, Any], ...] = (
        {"head": lambda path: True, "weight_rate": 0.0},
        {"head": lambda path: False},
    )
    for settings in cases:
        run = simulated(fb.algorithms.fedala(loss, work, **settings), start())
        np.testing.assert_allclose(whole(run.shared), whole(plain.shared), rtol=1e-5)
        assert run.message_bits.up == plain.message_bits.up


@pytest.mark.slow
def test_weights_of_zero_are_training_alone():
    work = fb.Work(RATE, **NOISY)
    still = fb.algorithms.fedala(loss, work, head=lambda path: True, weight_rate=0.0)

    def enroll(params, shard, key):
        join, state = still.enroll(params, shard, key)
        return join, state._replace(weights=jax.tree.map(jnp.zeros_like, params))

    run = simulated(still._replace(enroll=enroll), start(), cohort=CLIENTS)
    alone = simulated(fb.local_only(loss, work), start(), cohort=CLIENTS)
    for client in range(CLIENTS):
        found, wanted = run.personal(client), alone.personal(client)
        np.testing.assert_allclose(whole(found), whole(wanted), rtol=2e-5, atol=1e-6)

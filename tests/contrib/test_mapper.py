# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MAPPER: its limits, where mixtures end, and what held-out rows say of alpha."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
import problems
from fedblend.data.datasets.built_in import quadratic_loss
from fedblend.simulation.sampling import cohorts

KEY, RATE = jax.random.key(2), 0.2
on = problems.quadratics()
NOISY: dict[str, Any] = {"steps": 3, "batch_size": 2}
FULL: dict[str, Any] = {"steps": 3, "batch_size": None}


def mapper(alpha: Any = 0.5, grid=0, held=0.0, **work):
    return fb.algorithms.mapper(
        on.loss, fb.Work(RATE, **work), alpha=alpha, grid=grid, held_out=held
    )


def new_run(algorithm, rounds=4, cohort=3, **settings):
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        KEY,
        rounds=rounds,
        cohort=cohort,
        **settings,
    )


def test_with_alpha_1_it_is_fedavg_bit_for_bit():
    found = new_run(mapper(1.0, **NOISY)).complete()
    wanted = new_run(fb.fedavg(on.loss, fb.Work(RATE, **NOISY))).complete()
    np.testing.assert_array_equal(found.shared, wanted.shared)
    np.testing.assert_array_equal(found.personal(3), found.shared)
    np.testing.assert_array_equal(found.client(3).personal, on.params)


def test_with_alpha_0_it_is_training_alone():
    found = new_run(mapper(0.0, **FULL)).complete()
    wanted = new_run(fb.local_only(on.loss, fb.Work(RATE, **FULL))).complete()
    for client in range(7):
        np.testing.assert_allclose(
            found.personal(client), wanted.personal(client), rtol=1e-6
        )
    np.testing.assert_array_equal(found.shared, on.params)


def test_a_fixed_alpha_between_ends_at_every_clients_own_optimum():
    """The personal model makes up for the shared one, which only has to stand still."""
    run = new_run(mapper(0.4, **FULL), rounds=400, cohort=7, every=400).complete()
    matrices, vectors = problems.client_matrices(on)
    for client in range(7):
        own = np.linalg.solve(matrices[client], vectors[client])
        np.testing.assert_allclose(run.personal(client), own, rtol=0, atol=1e-5)
        assert np.abs(run.client(client).personal - own).max() > 1e-2


def test_a_personal_model_survives_rounds_without_its_client():
    """Outside the cohort y_i and alpha_i stay, mixed with the newest shared model."""
    run, absent, states = new_run(mapper(0.5, 3, 0.4, **FULL), every=1), 0, []
    for record in run:
        number = record.round - 1
        cohort = cohorts(KEY, [number], 7, 3)[0].tolist() if record.round else []
        before, states = states, [jax.device_get(run.client(i)) for i in range(7)]
        for client, state in enumerate(states):
            mixed = state.alpha * run.shared + (1 - state.alpha) * state.personal
            np.testing.assert_allclose(run.personal(client), mixed, rtol=1e-6)
            if record.round and client not in cohort:
                assert state.alpha == before[client].alpha
                np.testing.assert_array_equal(state.personal, before[client].personal)
                absent += not np.array_equal(state.personal, on.params)
    assert absent > 3


@pytest.mark.slow
def test_held_out_rows_tell_who_is_alike():
    """Nine clients with few noisy rows around one center, and one far from it."""
    rng = np.random.default_rng(0)
    centers = np.concatenate([np.zeros((9, 20)), np.full((1, 20), 3.0)])
    rows = np.repeat(centers, 10, axis=0) + rng.standard_normal((100, 20))
    matrices = np.broadcast_to(np.eye(20), (100, 20, 20))
    federated_data = fb.federate((matrices, rows), np.split(np.arange(100), 10))
    algorithm = fb.algorithms.mapper(
        quadratic_loss, fb.Work(0.3, steps=4, batch_size=None), held_out=0.5
    )
    run = fb.simulate(
        algorithm, jnp.zeros(20), federated_data, KEY, rounds=30, every=30
    ).complete()
    alphas = np.array([run.client(i).alpha for i in range(10)])
    assert np.median(alphas[:9]) >= 0.4
    assert alphas[9] <= 0.1
    errors = [np.linalg.norm(run.personal(i) - centers[i]) for i in range(10)]
    unseen = rows.reshape(10, 10, 20)
    alone = [np.linalg.norm(unseen[i, 5:].mean(axis=0) - centers[i]) for i in range(9)]
    assert np.mean(errors[:9]) < 0.8 * np.mean(alone)


def test_too_few_rows_to_hold_out_leave_alpha_as_it_is():
    """Of 3, 1, 4, 2, 5, 2 and 1 rows the part 0.4 is a row or more of three."""
    alphas = np.linspace(0.31, 0.37, 7)
    run = new_run(mapper(alphas, 3, 0.4, **FULL), rounds=1, cohort=7).complete()
    found = np.array([run.client(i).alpha for i in range(7)])
    kept = np.isclose(found, alphas)
    np.testing.assert_array_equal(kept, [False, True, False, True, False, True, True])
    assert set(found[~kept].tolist()) <= {0.0, 0.5, 1.0}


def test_a_nudge_is_a_linear_term_for_the_shared_model():
    push = jnp.asarray([0.3, -0.2, 0.1], jnp.float32)
    shard = jax.device_put(on.federated_data.train.shard(4))
    down = fb.Down(on.params, jnp.zeros((), jnp.int32))
    algorithm = mapper(0.5, steps=1, batch_size=None)
    _, state = algorithm.enroll(on.params, shard, KEY)
    plain, nudged = (
        algorithm.client(message, state, shard, KEY)
        for message in (down, down._replace(correction=push))
    )
    np.testing.assert_allclose(
        nudged[0].delta, plain[0].delta - RATE * push, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(nudged[0].mean_gradient, plain[0].mean_gradient)
    jax.tree.map(np.testing.assert_array_equal, nudged[1], plain[1])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"alpha": 1.5}, r"alpha: 1.5 is not in \[0, 1\]"),
        (
            {"grid": 1, "held": 0.2},
            "grid: 1 is not a number of weights, 2 or more, nor 0",
        ),
        ({"grid": 3, "held": 0.0}, r"held_out: 0.0 is not in \(0, 1\)"),
        ({"grid": 3, "held": 1.0}, r"held_out: 1.0 is not in \[0, 1\)"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(settings, line):
    with pytest.raises(ValueError, match=line):
        mapper(**settings, **FULL)

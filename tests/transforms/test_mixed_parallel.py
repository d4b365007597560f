# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Parallel training minimizes the mixture it is told, or says that it would not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend.core import Aggregate, Up
from fedblend.transforms.mixed_fl import central_loss
from fedblend.transforms.mixed_fl.parallel import gain
from fedblend.trees import precision

LOSS, WEIGHTS, DIM = fb.datasets.quadratic_loss, (0.5, 0.5), 2
OWN = (np.array([[[3.0, 1.0], [1.0, 2.0]]]), np.array([[-4.0, 5.0]]))
"""The server's quadratic, far from what clients want."""
ROWS = (
    np.array([[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.5], [0.5, 1.0]]]),
    np.array([[6.0, 1.0], [2.0, -3.0]]),
)


def optimum(rows):
    matrix, vector = (
        WEIGHTS[0] * part.mean(0) + WEIGHTS[1] * own[0]
        for part, own in zip(rows, OWN, strict=True)
    )
    return np.linalg.solve(matrix, vector)


def end(algorithm, rows=ROWS, rounds=600, **options):
    clients = [np.array([number]) for number in range(len(rows[0]))]
    with precision("float64"):
        run = fb.simulate(
            algorithm,
            jnp.zeros(DIM),
            fb.federate(rows, clients),
            jax.random.key(0),
            rounds=rounds,
            every=rounds,
            central=fb.shard_of(OWN),
            **options,
        )
        return np.asarray(run.complete().shared)


def fedopt(server, steps=1, rate=0.2):
    return fb.fedopt(LOSS, fb.Work(rate, steps=steps, batch_size=None), server)


def parallel(inner, **settings):
    return fb.mixed_fl(
        inner, central_loss.on_rows(LOSS), how="parallel", weights=WEIGHTS, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "server",
    [0.2, 0.5, optax.sgd(0.05, momentum=0.6)],
    ids=["0.2", "0.5", "momentum"],
)
def test_with_one_step_the_servers_rate_changes_nothing_about_the_optimum(server):
    # Clients of two kinds; momentum repeats each step 1 / (1 - 0.6) times.
    reached = end(parallel(fedopt(server)))
    np.testing.assert_allclose(reached, optimum(ROWS), rtol=0, atol=1e-6)


def test_with_more_steps_only_drift_is_left_which_falls_with_the_rate():
    alike = tuple(part[:1] for part in ROWS)

    def build(rate):
        return parallel(fedopt(0.2, steps=4, rate=rate), steps=2)

    ends = end(build, alike, 1600, over=np.array([0.04, 0.02]))
    far = np.abs(ends - optimum(alike)).max(axis=1)
    assert far[0] < 0.2
    assert far[1] == pytest.approx(far[0] / 2, rel=0.1)


@pytest.mark.parametrize(
    ("server", "wanted"),
    [
        (optax.sgd(0.2, 0.9, nesterov=True), 2.0),
        (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.3)), 0.3),
        (optax.sgd(optax.piecewise_constant_schedule(0.1, {5000: 0.5})), None),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), None),
        (optax.chain(optax.trace(0.9), optax.trace(0.5), optax.sgd(1.0)), None),
        (optax.sgd(-1.0), None),
    ],
    ids=["nesterov", "decay", "schedule", "clipped", "two memories", "uphill"],
)
def test_the_gain_of_a_server_is_that_of_all_its_moves_or_there_is_none(server, wanted):
    algorithm = fedopt(server)
    down, state = algorithm.start(jnp.ones(DIM), None, None, None)  # pyright: ignore
    aggregate = Aggregate(Up(jnp.ones(DIM)), jnp.ones(()), jnp.ones((), int))
    found = gain(algorithm.server, aggregate, down, state, None)
    assert found == (wanted and pytest.approx(wanted, rel=1e-5))


def test_an_adaptive_server_is_refused_in_one_line():
    line = r"^mixed_fl: this server .*\(0.5, 0.5\); use one_way, or .* merge_optimizer"
    with pytest.raises(ValueError, match=line):
        end(parallel(fedopt(optax.adam(0.1))), rounds=1)


CLIPS = {
    "clip": lambda algorithm: fb.clip(algorithm, 0.1),
    "adaptive_clip": lambda algorithm: fb.adaptive_clip(algorithm, 0.1),
    "dp_fedavg": lambda algorithm: fb.dp_fedavg(
        algorithm, clip=0.1, noise=0.0, cohort=2
    ),
    "dp_ftrl": lambda algorithm: fb.dp_ftrl(
        algorithm, clip=0.1, noise=0.0, cohort=2, tree=4
    ),
}


@pytest.mark.parametrize("name", CLIPS)
def test_parallel_training_and_clipping_are_refused_in_either_order(name):
    plain, clip = fedopt(1.0), CLIPS[name]
    with pytest.raises(ValueError, match=rf"^{name}: .*use one_way$"):
        clip(parallel(plain))
    with pytest.raises(ValueError, match=r"^mixed_fl: these clients do not take plain"):
        end(parallel(clip(plain)), rounds=1)
    # With a rate of its own for the server it is the user's affair, and said so.
    with pytest.warns(match="none is clipped, another mixture"):
        clip(parallel(plain, optimizer=0.2))


def test_of_the_transfers_clipping_spoils_only_a_gradient_recovered_from_answers():
    recovered = fb.mixed_fl(fedopt(1.0), central_loss.on_rows(LOSS), how="two_way")
    with pytest.raises(ValueError, match=r"^clip: .* two_way without upload"):
        CLIPS["clip"](recovered)
    alike = tuple(part[:1] for part in ROWS)
    kept = fb.mixed_fl(
        fedopt(1.0), central_loss.on_rows(LOSS), how="two_way", upload=True
    )
    reached = end(CLIPS["clip"](kept), alike)
    np.testing.assert_allclose(reached, optimum(alike), rtol=0, atol=1e-6)

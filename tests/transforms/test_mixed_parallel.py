# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Parallel training minimizes the mixture it is told, or says that it would not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend.transforms import central_loss
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
    return fb.algorithms.fedopt(
        LOSS, fb.Work(rate, steps=steps, batch_size=None), server
    )


def parallel(inner, **settings):
    return fb.transforms.mixed_fl(
        inner, central_loss.row_loss(LOSS), how="parallel", weights=WEIGHTS, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize("server", [0.2, 0.5])
def test_with_one_step_the_servers_rate_changes_nothing_about_the_optimum(server):
    # Clients of two kinds.
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
    "server", [optax.adam(0.1), optax.sgd(0.2, momentum=0.9), 0.0, optax.sgd(0.5)]
)
def test_a_server_without_a_known_gain_is_refused_in_one_line(server):
    line = r"^mixed_fl: this server .*\(0.5, 0.5\); use one_way, or .* merge_optimizer"
    with pytest.raises(ValueError, match=line):
        parallel(fedopt(server))


CLIPS = {
    "clip": lambda algorithm: fb.transforms.clip(algorithm, 0.1),
    "adaptive_clip": lambda algorithm: fb.transforms.adaptive_clip(algorithm, 0.1),
    "dp_fedavg": lambda algorithm: fb.transforms.dp_fedavg(
        algorithm, clip=0.1, noise=0.0, cohort=2
    ),
    "dp_blt": lambda algorithm: fb.transforms.dp_blt(
        algorithm, clip=0.1, noise=0.0, cohort=2, strategy=fb.theory.blt.Blt()
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
    recovered = fb.transforms.mixed_fl(
        fedopt(1.0), central_loss.row_loss(LOSS), how="two_way"
    )
    with pytest.raises(ValueError, match=r"^clip: .* two_way without upload"):
        CLIPS["clip"](recovered)
    alike = tuple(part[:1] for part in ROWS)
    kept = fb.transforms.mixed_fl(
        fedopt(1.0), central_loss.row_loss(LOSS), how="two_way", upload=True
    )
    reached = end(CLIPS["clip"](kept), alike)
    np.testing.assert_allclose(reached, optimum(alike), rtol=0, atol=1e-6)

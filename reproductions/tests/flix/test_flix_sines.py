# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F7: two sines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedblend as fb
from fedblend.data.dataset import generator
from fedblend.data.partition import federate_dataset
from fedblend_reproductions.datasets import two_sines
from fedblend_reproductions.flix.sine_runs import (
    QUICK,
    RANGES,
    TOLERANCE,
    by_descent,
    descent,
    measured,
)
from fedblend_reproductions.flix.sines import check


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_the_descent_stops_where_the_gradient_is_small_and_no_later(scale):
    """On x^T diag(c) x / 2, scaled as FLIX scales by alpha, in two variables."""
    curvature = jnp.array([1.0, 30.0])
    optimizer = descent(scale)
    here = jnp.array([3.0, -2.0])
    state: Any = optimizer.init(here)
    norms = []
    for _ in range(60):
        gradient = scale**2 * curvature * here
        norms.append(float(jnp.linalg.norm(gradient)) / scale)
        updates, state = optimizer.update(gradient, state, here)
        here = optax.apply_updates(here, updates)
    steps = int(state.steps)
    assert 5 < steps < 60
    assert min(norms[:steps]) > TOLERANCE >= norms[steps]
    assert norms[steps:] == [norms[steps]] * (60 - steps)


def floor(seed):
    """The least mean error of one model for all: p (1 - p) mean (f_1 - f_2)^2."""
    rng = generator(seed, "two sines")
    size, phase = rng.uniform(*RANGES["text"], 2), rng.uniform(0, 2 * np.pi, 2)
    x = np.linspace(-5, 5, 1001)
    first, second = (a * np.sin(x + b) for a, b in zip(size, phase, strict=True))
    part = QUICK.firsts[0] / QUICK.clients
    return part * (1 - part) * np.mean((first - second) ** 2)


@pytest.fixture(scope="module")
def found():
    return check(True)


@pytest.mark.slow
def test_quick_check(found):
    numbers = found.numbers["by_descent"]["text"]
    (errors,) = numbers["test_error[split][seed][alpha]"]
    floors = np.array([floor(seed) for seed in range(QUICK.seeds)])
    assert (errors[:, -1] > 0.95 * floors).all()
    assert (errors[:, 0] < 0.9 * errors[:, -1]).all()
    assert (errors[:, 1:-1].min(axis=1) < errors[:, 0]).all()
    gain = 100 * numbers["gain_over_better_end[split]"][0]
    assert gain > 0
    assert f"by {-gain:+.1f} to" in found.ours
    assert set(found.figures) == {"alpha"}


@pytest.mark.slow
def test_a_column_is_the_run_of_its_own_data_set():
    """One column of the sweep beside a plain run of FLIX on that data set alone."""
    size = QUICK._replace(rounds=20, alphas=(0.0, 0.5, 1.0))
    outcome = measured(size, "code", by_descent(20))
    data = two_sines(
        clients=size.clients, first=size.firsts[0], test_points=size.test_points, seed=1
    )
    federated_data = federate_dataset(
        data, fb.partition.by_key(data.keys), test="official"
    )
    model = fb.models.mlp(1, 1, hidden=(40, 40), activation="tanh")
    half = fb.losses.squared_error(model.apply)

    def loss(params, rows):
        return 2 * half(params, rows)

    algorithm = fb.flix(
        loss,
        lambda mixed: fb.algorithms.fedopt(
            mixed, fb.Work(1.0, steps=1, batch_size=None), descent(0.5)
        ),
        alpha=0.5,
        local=by_descent(20)(loss),
    )
    run = fb.simulate(
        algorithm,
        model.init(jax.random.key(1)),
        federated_data,
        jax.random.key(0),
        rounds=20,
        splits=("test",),
        measure={"mse": fb.metrics.mean_squared_error(model.apply)},
    )
    alone = run.summary()["measures"]["test"]["personal"]["mse"]["mean"]
    assert alone == pytest.approx(outcome.errors[0, 1, 1], rel=0.02)

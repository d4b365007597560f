# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedDBE: its paper's loop, and what it is without its penalty."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend.batches import random_rows
from fedblend.simulation.sampling import cohorts
from fedblend_reproductions.feddbe import Shifted, feddbe, shifted

CLIENTS, DIM, WIDTH, ROUNDS, COHORT, RATE, KAPPA = 5, 3, 2, 4, 3, 0.2, 0.3
KEY = jax.random.key(1)


def literal_step(A, h, shift, inputs, labels, mean, kappa, rate):
    """Zhang et al. 2023, eq. (5): features A x, score h (A x + shift), all rows."""
    to_A, to_h, to_shift = np.zeros_like(A), np.zeros_like(h), np.zeros_like(shift)
    center, middle = np.zeros(A.shape[0]), np.zeros(A.shape[1])
    for x, y in zip(inputs, labels, strict=True):
        z = A @ x + shift
        slope = (1 / (1 + np.exp(-(h @ z))) - y) / len(labels)
        to_A += slope * np.outer(h, x)
        to_h += slope * z
        to_shift += slope * h
        center += A @ x / len(labels)
        middle += x / len(labels)
    to_A += kappa * 2 / len(center) * np.outer(center - mean, middle)
    return A - rate * to_A, h - rate * to_h, shift - rate * to_shift


def literal_mean(A, h, batches, rate):
    """The initialization of a client in the authors' code, ``client.train()``.

    ``global_mean`` is None: there is no penalty, and the head takes the features as
    they are. ``running_mean`` has momentum 1.
    """
    running_mean = np.zeros(len(h))
    for inputs, labels in batches:
        running_mean = 0.0 * running_mean + 1.0 * (inputs @ A.T).mean(axis=0)
        none = np.zeros(len(h))
        A, h, _ = literal_step(A, h, none, inputs, labels, none, 0.0, rate)
    return running_mean


def literal_run(rows, A, h, cohorts, rate, steps, kappa):
    """Zhang et al. 2023, Algorithm 1, with momentum 1: A, h, all shifts, the mean."""
    total, mean = sum(len(labels) for _, labels in rows), np.zeros(len(h))
    for inputs, labels in rows:
        batches = [(inputs, labels)] * steps
        mean = mean + len(labels) / total * literal_mean(A, h, batches, rate)
    shifts = np.zeros((len(rows), len(h)))
    for cohort in cohorts:
        weight = sum(len(rows[i][1]) for i in cohort)
        mean_A, mean_h = np.zeros_like(A), np.zeros_like(h)
        for i in cohort:
            own = A, h, shifts[i]
            for _ in range(steps):
                inputs, labels = rows[i]
                own = literal_step(*own, inputs, labels, mean, kappa, rate)
            shifts[i] = own[2]
            mean_A += len(rows[i][1]) / weight * own[0]
            mean_h += len(rows[i][1]) / weight * own[1]
        A, h = mean_A, mean_h
    return A, h, shifts, mean


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def federation():
    """Clients whose inputs lie at different places."""
    draws = np.random.default_rng(2)
    counts = (6, 4, 7, 5, 8)
    places = np.repeat(draws.normal(size=(CLIENTS, DIM)), counts, axis=0)
    inputs = places + draws.normal(size=(sum(counts), DIM))
    labels = ((inputs - places)[:, 0] > 0).astype(int)
    ends = np.cumsum(counts)
    return fb.federate((inputs, labels), np.split(np.arange(ends[-1]), ends[:-1]))


DATA = federation()
ROWS = [DATA.train.rows(client) for client in range(CLIENTS)]
START = np.random.default_rng(4).normal(size=(WIDTH, DIM)), np.array([0.4, -0.7])


def model():
    def init(key):
        return jax.tree.map(jnp.asarray, {"A": START[0], "h": START[1]})

    def features(params, inputs):
        return inputs @ params["A"].T

    def head(params, values):
        return values @ params["h"]

    halves = fb.Model(init, lambda p, x: head(p, features(p, x)), features, head)
    return shifted(halves, (DIM,))


def simulated(algorithm):
    run = fb.simulate(
        algorithm, model().init, DATA, KEY, rounds=ROUNDS, cohort=COHORT,
        weights="by_count",
    )  # fmt: skip
    return run.complete()


def built(kappa, **work):
    used: Any = model()
    loss = fb.losses.logistic(used.apply)
    settings = {"features": used.features, "kappa": kappa}
    return feddbe(loss, fb.Work(RATE, **work), **settings)


def test_it_is_its_papers_loop():
    """Float64 rounds at 1e-16, and a dozen steps stay far below the tolerance."""
    run = simulated(built(KAPPA, steps=3, batch_size=None))
    members = cohorts(KEY, list(range(ROUNDS)), CLIENTS, COHORT).tolist()
    A, h, shifts, mean = literal_run(ROWS, *START, members, RATE, 3, KAPPA)
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(run.down.extra["feddbe"], mean, **tolerance)
    np.testing.assert_allclose(run.shared.model["A"], A, **tolerance)
    np.testing.assert_allclose(run.shared.model["h"], h, **tolerance)
    found = [run.personal(client).shift for client in range(CLIENTS)]
    np.testing.assert_allclose(found, shifts, **tolerance)
    assert np.abs(shifts).max() > 0.1 and np.abs(A - START[0]).max() > 0.1


def test_enrollment_trains_no_shift_and_sends_the_mean_of_the_last_batch():
    """As in the authors' code: four batches of two rows."""
    shard = DATA.train.shard(2)
    inputs, labels = ROWS[2]
    picked = np.asarray(random_rows(shard, KEY, (4, 2)))
    batches = [(inputs[rows], labels[rows]) for rows in picked]
    algorithm = built(KAPPA, steps=4, batch_size=2)
    mean, client = algorithm.enroll(model().init(KEY), shard, KEY)
    wanted = literal_mean(*START, batches, RATE)
    np.testing.assert_allclose(mean, wanted, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(client.personal.shift, np.zeros(WIDTH))


@pytest.mark.slow
def test_without_penalty_it_is_fedsim_with_a_personal_shift():
    run = simulated(built(0.0, steps=3, batch_size=3))
    loss = fb.losses.logistic(model().apply)
    work = fb.Work(RATE, steps=3, batch_size=3)
    plain = simulated(fb.algorithms.fedsim(loss, work, personal=["shift"]))
    for client in range(CLIENTS):
        pair = run.personal(client), plain.personal(client)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *pair)
    assert run.message_bits.up == plain.message_bits.up
    assert run.message_bits.down == plain.message_bits.down + 64 * WIDTH


def test_a_model_without_a_shift_or_halves_is_refused_in_one_line():
    algorithm = built(1.0, steps=1, batch_size=None)
    line = "^feddbe: params: a model without shift is not one with shifted features"
    with pytest.raises(ValueError, match=line):
        algorithm.enroll(jnp.zeros(2), DATA.train.shard(0), KEY)
    plain = fb.Model(lambda key: jnp.zeros(2), lambda params, inputs: inputs @ params)
    line = "^shifted: model: one without them is not a model with its halves"
    with pytest.raises(ValueError, match=line):
        shifted(plain, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
def test_the_halves_of_a_model_are_the_model(name):
    used: Any = fb.models.build(name, (16, 16, 1), 1 if name == "logistic" else 3)
    inputs = jax.random.normal(KEY, (2, 16, 16, 1))
    params = jax.tree.map(lambda leaf: leaf + 0.1, used.init(KEY))
    moved: Any = shifted(used, (16, 16, 1))
    own = Shifted(params, jnp.full_like(moved.init(KEY).shift, 0.5))
    found = used.head(params, used.features(params, inputs) + 0.5)
    np.testing.assert_array_equal(found, moved.apply(own, inputs))
    assert np.abs(found - used.apply(params, inputs)).max() > 1e-3

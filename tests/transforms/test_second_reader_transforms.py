# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clipping, privacy and federated select against NumPy loops in float64.

The loops were written from the papers before the transforms were read: adaptive
clipping and its noise from Andrew et al. 2021 (Algorithm 1), the noise of a sum from
McMahan et al. 2018, federated select from Charles et al. 2022.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedblend as fb
from fedblend import keys
from fedblend.trees import precision

COUNTS = (4, 1, 6, 3, 2)
TABLE, WIDTH = 9, 2
RATE, STEPS, ROUNDS = 0.3, 3, 4
CLOSE = {"rtol": 0, "atol": 1e-10}


class Model(NamedTuple):
    """A table of which a row is read for every example, and a dense vector."""

    table: Any
    dense: Any


@pytest.fixture(autouse=True, scope="module")
def wide():
    with precision("float64"):
        yield


def rows(seed=0):
    draws = np.random.default_rng(seed)
    number = draws.integers(1, TABLE, sum(COUNTS)).astype(np.int32)
    return number, draws.normal(size=(sum(COUNTS), WIDTH))


def federated_data():
    places = np.split(np.arange(sum(COUNTS)), np.cumsum(COUNTS)[:-1])
    return fb.federate(rows(), places)


def begin():
    draws = np.random.default_rng(1)
    return Model(draws.normal(size=(TABLE, WIDTH)), draws.normal(size=WIDTH))


def loss(params, examples):
    number, target = examples
    gap = params.table[number] + params.dense[None] - target
    return (gap**2).sum(axis=1) / 2


def mean_gradient(model, number, target):
    """The gradient of the mean loss, one example after another."""
    table, dense = np.zeros_like(model.table), np.zeros_like(model.dense)
    for row, wanted in zip(number, target, strict=True):
        gap = (model.table[row] + model.dense - wanted) / len(number)
        table[row] += gap
        dense += gap
    return Model(table, dense)


def local_step_sum(model, data, correction=None):
    """Delta of a client that takes STEPS plain steps, all its rows in each."""
    here = model
    for _ in range(STEPS):
        push = mean_gradient(here, *data)
        if correction is not None:
            push = Model(*(a + b for a, b in zip(push, correction, strict=True)))
        here = Model(*(a - RATE * b for a, b in zip(here, push, strict=True)))
    return Model(*(a - b for a, b in zip(here, model, strict=True)))


def norm(model):
    return np.sqrt(sum((leaf**2).sum() for leaf in model))


def added(model, deltas, weights):
    """The model plus the sum of deltas, each times its weight."""
    leaves = (
        leaf
        + sum(weight * one[place] for weight, one in zip(weights, deltas, strict=True))
        for place, leaf in enumerate(model)
    )
    return Model(*leaves)


def own(clients):
    return [clients.train.rows(client) for client in range(len(COUNTS))]


def clipping_rounds(clip, weights, *, quantile=None, rate=0.2, present=None, size=None):
    """Andrew et al., Algorithm 1, without noise; returns the model and C.

    ``weights`` are those of the mean. With ``size``, the sum is divided by that planned
    number of clients, whichever are ``present[round]``.
    """
    model, data = begin(), own(federated_data())
    for round in range(ROUNDS):
        there = np.flatnonzero(present[round]) if present is not None else range(5)
        deltas = [local_step_sum(model, data[client]) for client in there]
        share = np.array([weights[client] for client in there], float)
        share /= share.sum() if size is None else size
        within = np.array([norm(delta) <= clip for delta in deltas])
        shrink = [min(1.0, clip / norm(delta)) for delta in deltas]
        model = added(model, deltas, share * shrink)
        if quantile is not None:
            b = (share * within).sum()
            clip = clip * np.exp(-rate * (b - quantile))
    return model, clip


def simulated(algorithm, key=0, **options):
    params = Model(*map(jnp.asarray, begin()))
    what = (algorithm, params, federated_data(), jax.random.key(key))
    return fb.simulate(*what, rounds=ROUNDS, every=ROUNDS, **options).complete()


def plain():
    return fb.fedavg(loss, fb.Work(RATE, steps=STEPS, batch_size=None))


def agree(run, model):
    for ours, theirs in zip(run.shared, model, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


def test_a_fixed_clip_is_the_loops():
    norms = [norm(local_step_sum(begin(), data)) for data in own(federated_data())]
    clip = float(np.median(norms))
    assert min(norms) < clip < max(norms)
    model, _ = clipping_rounds(clip, COUNTS)
    agree(simulated(fb.transforms.clip(plain(), clip)), model)


@pytest.mark.parametrize("weights", ["uniform", "by_count"])
def test_a_clip_by_quantile_is_the_loops(weights):
    given = np.ones(5) if weights == "uniform" else COUNTS
    model, clip = clipping_rounds(1.0, given, quantile=0.3, rate=0.7)
    assert abs(np.log(clip)) > 0.1
    wrapped = fb.transforms.adaptive_clip(plain(), 1.0, quantile=0.3, rate=0.7)
    run = simulated(wrapped, weights=weights)
    agree(run, model)
    held = [float(leaf) for leaf in jax.tree.leaves((run.server, run.down.extra))]
    assert min(abs(np.array(held) - clip)) < 1e-10


def answers_of(seed, dropout):
    """Which clients answer in each round, by the runtime's rule for dropping out."""
    root = jax.random.key(seed)
    lots = [
        [
            jax.random.uniform(keys.derive(root, "dropout", r, client))
            for client in range(5)
        ]
        for r in range(ROUNDS)
    ]
    return np.array(lots) >= dropout


def test_a_private_sum_is_divided_by_the_planned_cohort_whoever_answers():
    present = answers_of(2, 0.4)
    assert not present.all()
    assert present.any(axis=1).all()
    model, _ = clipping_rounds(0.8, np.ones(5), present=present, size=5)
    silent = fb.transforms.dp_fedavg(plain(), clip=0.8, noise=0.0, cohort=5)
    agree(simulated(silent, 2, cohort=fb.Cohort(dropout=0.4)), model)


class Wide(NamedTuple):
    vector: jax.Array


@cache
def noise_of(**options):
    """Of one round in which no client moves: the noise alone, and C after it."""
    clients, options = federated_data(), {"noise_from": "seed", **options}

    def still(params, examples):
        return jnp.zeros_like(examples[1][:, 0]) + 0 * params.vector.sum()

    algorithm = fb.transforms.dp_fedavg(
        fb.fedavg(still, fb.Work(RATE, steps=1, batch_size=None)), cohort=5, **options
    )
    params = Wide(jnp.zeros(4000))
    run = fb.simulate(
        algorithm, params, clients, jax.random.key(5), rounds=1, every=1
    ).complete()
    return np.asarray(run.shared.vector), run


def test_the_noise_is_gaussian_with_clip_times_multiplier_over_the_cohort():
    small, _ = noise_of(clip=0.5, noise=1.0)
    large, _ = noise_of(clip=1.5, noise=2.0)
    np.testing.assert_allclose(large, 6 * small, **CLOSE)
    standard = small * 5 / 0.5
    # Of 4000 draws: mean, spread and fourth moment within five standard errors.
    assert abs(standard.mean()) < 5 / np.sqrt(4000)
    assert abs(standard.std() - 1) < 5 / np.sqrt(8000)
    assert abs((standard**4).mean() - 3) < 5 * np.sqrt(96 / 4000)


def test_the_noise_of_the_count_is_paid_for_by_that_of_the_sum():
    """z' = (z^-2 - (2 s)^-2)^(-1/2); C moves by the noisy share of those within."""
    z, rate, quantile = 1.0, 0.2, 0.4
    alone, _ = noise_of(clip=0.5, noise=z)
    moves = []
    for s in (0.8, 3.0):
        both, run = noise_of(
            clip=0.5, noise=z, quantile=quantile, rate=rate, count_noise=s
        )
        raised = (z**-2 - (2 * s) ** -2) ** -0.5
        np.testing.assert_allclose(both, raised / z * alone, **CLOSE)
        held = [float(leaf) for leaf in jax.tree.leaves((run.server, run.down.extra))]
        (clip,) = [value for value in held if value not in (0.0, 1.0)]
        # No client moves, so that all are within: b = 1 and the noise of the count.
        moves.append(((np.log(clip / 0.5) / -rate + quantile) - 1) * 5 / s)
    assert abs(moves[0] - moves[1]) < 1e-10
    assert 0 < abs(moves[0]) < 5

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rates that move: by round, by step over all rounds, and by client."""

import jax
import numpy as np
import optax
import pytest

import fedblend as fb
import problems
from fedblend.local import resolve
from fedblend.trees import precision

on = problems.quadratics()
STEPS_BY_CLIENT = np.array([1, 3, 2, 4, 1, 2, 3])
ROUNDS = 3


def schedule(count):
    return 0.3 / (1 + 0.5 * count)


def trained_by_hand(steps, unit):
    """Everyone takes part; step s of a client's round t has the rate it should."""
    matrices, vectors = problems.client_matrices(on)
    counts = on.federated_data.train.counts
    x = np.asarray(on.params, float)
    for number in range(ROUNDS):
        reached = []
        for i in range(7):
            y = x.copy()
            for step in range(steps[i]):
                count = number if unit == "round" else number * steps[i] + step
                y = y - schedule(count) * (matrices[i] @ y - vectors[i])
            reached.append(y)
        x = np.average(reached, axis=0, weights=counts)
    return x


@pytest.mark.parametrize("unit", ["round", "step"])
@pytest.mark.parametrize("steps", [3, STEPS_BY_CLIENT], ids=["same", "by client"])
def test_the_rate_follows_the_schedule(unit, steps):
    algorithm = fb.fedavg(
        on.loss, fb.Work(fb.Scheduled(schedule, unit), steps=steps, batch_size=None)
    )
    run = fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        jax.random.key(0),
        rounds=ROUNDS,
        every=2,
    )
    wanted = trained_by_hand(np.broadcast_to(steps, 7), unit)
    # Some 20 float32 steps on parameters of size 1.
    np.testing.assert_allclose(run.complete().shared, wanted, rtol=1e-5, atol=1e-6)


def test_a_schedule_inside_optax_starts_anew_every_round():
    plain = fb.fedavg(on.loss, fb.Work(optax.sgd(schedule), steps=1, batch_size=None))
    fixed = fb.fedavg(on.loss, fb.Work(0.3, steps=1, batch_size=None))
    ends = [
        fb.simulate(a, on.params, on.federated_data, jax.random.key(0), rounds=ROUNDS)
        for a in (plain, fixed)
    ]
    np.testing.assert_allclose(ends[0].shared, ends[1].shared, rtol=1e-6)


@pytest.mark.parametrize("unit", ["round", "step"])
def test_a_rate_made_of_whole_numbers_is_as_wide_as_the_model(unit):
    with precision("float64"):
        rule = resolve(
            fb.Scheduled(lambda count: 1 / (count + 2), unit), jax.numpy.int32(1), 1
        )
        mean_gradient = np.ones(1)
        step, _ = rule.update(mean_gradient, rule.init(mean_gradient))  # pyright: ignore
        assert abs(float(step[0]) + 1 / 3) < 1e-15  # pyright: ignore


def test_an_unknown_unit_is_refused_in_one_line():
    with pytest.raises(ValueError, match="unit: 'epoch' is not 'step' or 'round'"):
        fb.fedavg(
            on.loss, fb.Work(fb.Scheduled(schedule, "epoch"), steps=1, batch_size=None)
        )

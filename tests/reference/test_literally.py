# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Handed-back rows, populations and corrections of some parameters, in plain NumPy.

Everything in float64 and from the equations alone: logistic losses, all rows in every
step, cohorts read off the run's own draws.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from second_reader import apfl_visit, slope

import fedblend as fb
from fedblend.simulation.sampling import complete_strata, draw_with
from fedblend.transforms import central_loss
from fedblend.trees import precision

DIM, RATE, ROOT = 3, 0.3, jax.random.key(3)
COUNTS = (7, 1, 12, 3, 5)


def logistic(w, rows):
    x, y = rows
    return jnp.log1p(jnp.exp(-y * (x @ w))) + 0.05 * w @ w


@pytest.fixture(autouse=True)
def float64():
    with precision("float64"):
        yield


def federated_data():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(sum(COUNTS), DIM))
    y = np.sign(rng.normal(size=len(x)) + x[:, 0])
    return fb.federate((x, y), np.split(np.arange(len(x)), np.cumsum(COUNTS)[:-1]))


def everyone(on):
    return [on.train.rows(client) for client in range(on.clients)]


@pytest.mark.parametrize("learn", ["step", "round"])
def test_held_out_rows_are_handed_back(learn):
    """Deng et al., with alpha on the first rows of a client until round 3."""
    on, share, until, steps, pace = federated_data(), 0.4, 3, 2, 0.7
    start, rounds = np.array([0.3, -0.2, 0.1]), 5
    w, v, a = start, [start.copy() for _ in COUNTS], [0.4] * len(COUNTS)
    cohorts = draw_with(len(COUNTS), 3)(ROOT, range(rounds))
    for round, cohort in enumerate(cohorts):
        reached = []
        for i in cohort:
            x, y = on.train.rows(int(i))
            held = int(np.floor(share * len(y))) if round < until else 0
            judge, own = (x[:held], y[:held]), (x[held:], y[held:])
            w_i = w
            for step in range(steps):
                mixed = a[i] * v[i] + (1 - a[i]) * w_i
                weight = a[i]
                if held and (learn == "step" or step == 0):
                    along = (v[i] - w_i) @ slope(mixed, judge)
                    weight = min(max(a[i] - pace * along, 0.0), 1.0)
                fixed = {"rates": [RATE], "alpha_rate": 0.0, "when": "fixed"}
                w_i, v[i], _ = apfl_visit(own, w_i, v[i], a[i], **fixed)
                a[i] = weight
            reached.append(w_i)
        w = np.mean(reached, axis=0)
    algorithm = fb.apfl(
        logistic,
        fb.Work(RATE, steps=steps, batch_size=None),
        alpha=0.6,
        learn=learn,
        alpha_rate=pace,
        held_out=share,
        hand_back=until,
    )
    run = fb.simulate(
        algorithm, jnp.asarray(start), on, ROOT, rounds=rounds, cohort=3
    ).complete()
    np.testing.assert_allclose(run.shared, w, atol=1e-12)
    for client in range(len(COUNTS)):
        np.testing.assert_allclose(1 - run.client(client).alpha, a[client], atol=1e-12)
        mixed = a[client] * v[client] + (1 - a[client]) * w
        np.testing.assert_allclose(run.personal(client), mixed, atol=1e-12)
    assert np.ptp(a) > 0.01


def test_alpha_stays_even_if_its_optimizer_moves_without_a_slope():
    algorithm = fb.apfl(
        logistic,
        fb.Work(RATE, steps=2, batch_size=None),
        alpha=0.6,
        alpha_rate=optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5)),
        held_out=0.4,
        hand_back=2,
    )
    alphas = []
    for rounds in (2, 4):
        run = fb.simulate(
            algorithm, jnp.zeros(DIM), federated_data(), ROOT, rounds=rounds
        )
        run.complete()
        alphas.append([float(run.client(i).alpha) for i in range(len(COUNTS))])
    assert alphas[0] == alphas[1]
    assert alphas[0][1] == 0.6  # it has one row
    assert min(alphas[0]) < 0.59


@pytest.mark.parametrize("by_count", [False, True])
def test_a_round_of_populations(by_count):
    """w_p over the drawn part of each population, by hand, for clients of all sizes."""
    of, weights, sizes = np.array([1, 0, 1, 0, 1]), (0.7, 0.3), (2, 1)
    on, rounds = federated_data(), 6
    strata, size = complete_strata(fb.Strata(of, weights, sizes), len(COUNTS))
    cohorts = draw_with(len(COUNTS), size, strata)(ROOT, range(rounds))
    own = np.array(COUNTS) if by_count else np.ones(len(COUNTS))
    w = np.zeros(DIM)
    for cohort in cohorts:
        above, below = np.zeros(DIM), 0.0
        for p, (weight, drawn) in enumerate(zip(weights, sizes, strict=True)):
            members = np.flatnonzero(of == p)
            chosen = [i for i in cohort if of[i] == p]
            assert len(chosen) == drawn
            for i in chosen:
                # A client's part of f_p over the chance to be drawn.
                part = weight * own[i] / own[members].sum() * len(members) / drawn
                above += part * -RATE * slope(w, everyone(on)[i])
                below += part
        assert by_count or abs(below - 1) < 1e-12
        w = w + above / below
    run = fb.simulate(
        fb.fedavg(logistic, fb.Work(RATE, steps=1, batch_size=None)),
        jnp.zeros(DIM),
        on,
        ROOT,
        rounds=rounds,
        cohort=fb.Strata(of, weights, sizes),
        weights="by_count" if by_count else "uniform",
    ).complete()
    np.testing.assert_allclose(run.shared, w, atol=1e-12)


@pytest.mark.parametrize("how", ["one_way", "two_way"])
def test_a_nudge_of_some_parameters(how):
    """Mixed FL with the paper's w_f and w_c, and a server's loss of "table" alone."""
    on, steps, rounds = federated_data(), 2, 4
    w_f, w_c, target = 0.6, 0.4, np.array([1.0, -2.0])

    def loss(here, rows):
        return logistic(jnp.concatenate([here["table"], here["rest"]]), rows)

    def central_slope(w):
        return w_c * np.array([*(w[:2] - target), 0.0])

    eta, data = RATE / w_f, everyone(on)
    parts = np.array(COUNTS) / sum(COUNTS)
    w = np.array([0.2, 0.1, -0.3])
    told, borrowed = np.zeros(DIM), np.zeros(DIM)
    for _ in range(rounds):
        if how == "one_way":
            told = central_slope(w)
        moved, slopes = [], []
        for rows in data:
            here = w
            for _ in range(steps):
                push = w_f * slope(here, rows)
                slopes.append(push)
                here = here - eta * (push + told)
            moved.append(here - w)
        x_f = w + parts @ np.array(moved)
        if how == "one_way":
            w = x_f
            continue
        x_c, central_slopes = w, []
        for _ in range(steps):
            central_slopes.append(central_slope(x_c))
            x_c = x_c - eta * (central_slopes[-1] + borrowed)
        each = np.array(slopes).reshape(len(data), steps, DIM).mean(axis=1)
        told, borrowed = np.mean(central_slopes, axis=0), parts @ each
        w = (x_f + x_c) / 2
    server = central_loss.parameter_loss(
        lambda here: jnp.square(here["table"] - target).sum() / 2
    )
    clients = fb.fedavg(loss, fb.Work(RATE, steps=steps, batch_size=None))
    mixed = fb.transforms.mixed_fl(
        clients, server, how=how, weights=(w_f, w_c), steps=steps
    )
    start = {"table": jnp.array([0.2, 0.1]), "rest": jnp.array([-0.3])}
    run = fb.simulate(mixed, start, on, ROOT, rounds=rounds).complete()
    found = np.concatenate([run.shared["table"], run.shared["rest"]])
    np.testing.assert_allclose(found, w, atol=1e-12)

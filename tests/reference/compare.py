# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs fedblend beside the transcriptions, in float64."""

from typing import Any

import jax
import numpy as np
import optax
import transcriptions as paper

import fedblend as fb
import problems
from fedblend import keys
from fedblend.batches import random_rows
from fedblend.simulation.sampling import cohorts

RATE, ROUNDS, COHORT = 0.2, 9, 4
SAME = np.full(7, 5)
BY_CLIENT = np.array([1, 3, 2, 6, 1, 2, 4])

on = problems.quadratics()
root = jax.random.key(7)
start = np.asarray(on.params)
rounds = cohorts(root, list(range(ROUNDS)), 7, COHORT).tolist()
matrices, vectors = problems.client_matrices(on)
by_count = paper.Quadratic(matrices, vectors, on.federated_data.train.counts)
uniform = paper.Quadratic(matrices, vectors, np.ones(7))
full: dict[str, Any] = {"batch_size": None}


def run(algorithm, weights):
    """fedblend's run of the same rounds; its chunks are padded."""
    return fb.simulate(
        algorithm,
        on.params,
        on.federated_data,
        root,
        rounds=ROUNDS,
        cohort=COHORT,
        chunk=3,
        every=4,
        weights=weights,
    ).complete()


def personal(run):
    return np.stack([run.personal(client) for client in range(7)])


def gap(ours, theirs) -> float:
    assert np.asarray(ours).dtype == np.float64
    assert np.abs(theirs - start).max() > 1e-2, "nothing was learned"
    return float(np.abs(np.asarray(ours) - theirs).max())


def fedavg_gaps():
    for name, steps in (("same steps", SAME), ("steps by client", BY_CLIENT)):
        ours = 5 if steps is SAME else steps
        algorithm = fb.fedavg(on.loss, fb.Work(RATE, steps=ours, **full))
        for weights, problem in (("by_count", by_count), ("uniform", uniform)):
            theirs = paper.fedavg(problem, start, rounds, RATE, steps)
            yield f"fedavg, {name}, {weights}", run(algorithm, weights).shared, theirs


def fedprox_gaps():
    algorithm = fb.algorithms.fedprox(on.loss, fb.Work(RATE, steps=5, **full), mu=0.7)
    theirs = paper.fedprox(by_count, start, rounds, RATE, SAME, 0.7)
    yield "fedprox", run(algorithm, "by_count").shared, theirs


def fedopt_gaps():
    servers = {
        "adam": (optax.adam(0.1), paper.adam),
        "yogi": (optax.yogi(0.1), paper.yogi),
        "adagrad": (optax.adagrad(0.1), paper.adagrad),
        "momentum": (optax.sgd(0.1, 0.9), paper.momentum),
    }
    for name, (ours, rule) in servers.items():
        algorithm = fb.algorithms.fedopt(on.loss, fb.Work(RATE, steps=5, **full), ours)
        theirs = paper.fedopt(by_count, start, rounds, RATE, SAME, 0.1, rule)
        yield f"fedopt, {name}", run(algorithm, "by_count").shared, theirs


def scaffold_gaps():
    for steps in (SAME, BY_CLIENT):
        for weights, problem in (("by_count", by_count), ("uniform", uniform)):
            ours = 5 if steps is SAME else steps
            algorithm = fb.scaffold(
                on.loss, fb.Work(RATE, steps=ours, **full), server_rate=0.8
            )
            done = run(algorithm, weights)
            x, c, own = paper.scaffold(problem, start, rounds, RATE, steps, 0.8)
            name = f"scaffold, {'same' if steps is SAME else 'other'} steps, {weights}"
            yield f"{name}: model", done.shared, x
            yield f"{name}: server control", done.down.extra["scaffold"], c
            controls = np.stack([done.client(client).control for client in range(7)])
            yield f"{name}: client controls", controls, own


def svrg_gaps():
    """Batches and coins are fedblend's; what is done with them is the paper's."""
    train, refresh = on.federated_data.train, 0.4
    batches, coins = [], []
    for number in range(ROUNDS):
        own = [keys.derive(root, "client", number, client) for client in range(7)]
        drawn = [
            random_rows(train.shard(client), key, (3, 2))
            for client, key in enumerate(own)
        ]
        batches.append([np.asarray(rows) for rows in drawn])
        named = [keys.named(key, "anchor") for key in own]
        coins.append([bool(jax.random.bernoulli(key, refresh)) for key in named])
    rows = [train.rows(client) for client in range(7)]
    algorithm = fb.algorithms.svrg(
        on.loss, fb.Work(RATE, steps=3, batch_size=2), refresh=refresh
    )
    for weights, share in (("by_count", train.counts), ("uniform", np.ones(7))):
        problem = paper.Quadratic(matrices, vectors, share, rows)
        done = run(algorithm, weights)
        x, anchors, slopes = paper.svrg(problem, start, rounds, RATE, batches, coins)
        states = [done.client(client) for client in range(7)]
        yield f"svrg, {weights}: model", done.shared, x
        anchor = np.stack([state.anchor for state in states])
        yield f"svrg, {weights}: anchors", anchor, anchors
        slope = np.stack([state.mean_gradient for state in states])
        yield f"svrg, {weights}: slopes", slope, slopes


def personal_gaps():
    alone = run(fb.local_only(on.loss, fb.Work(RATE, steps=5, **full)), "by_count")
    theirs = paper.local_only(by_count, start, rounds, RATE, SAME)
    yield "local only", personal(alone), theirs
    inner = fb.fedavg(on.loss, fb.Work(RATE, steps=5, **full))
    tuned = run(fb.finetune(inner, on.loss, fb.Work(0.1, steps=4, **full)), "by_count")
    shared = paper.fedavg(by_count, start, rounds, RATE, SAME)
    theirs = paper.localized(by_count, shared, 0.1, np.full(7, 4))
    yield "finetune", personal(tuned), theirs


def meta_gaps():
    methods = {
        "reptile": (fb.algorithms.reptile, paper.reptile, 0.7),
        "fomaml": (fb.algorithms.fomaml, paper.fomaml, 0.3),
    }
    for name, (ours, theirs, rate) in methods.items():
        for steps in (SAME, BY_CLIENT):
            inner = 5 if steps is SAME else steps
            algorithm = ours(on.loss, fb.Work(0.1, steps=inner, **full), rate)
            for weights, problem in (("by_count", by_count), ("uniform", uniform)):
                done = run(algorithm, weights)
                x = theirs(problem, start, rounds, 0.1, steps, rate)
                case = (
                    f"{name}, {'same' if steps is SAME else 'other'} steps, {weights}"
                )
                yield f"{case}: model", done.shared, x
                yield (
                    f"{case}: personal",
                    personal(done),
                    paper.localized(problem, x, 0.1, steps),
                )


def gaps() -> dict[str, float]:
    """The largest difference in every comparison."""
    parts = (
        fedavg_gaps,
        fedprox_gaps,
        fedopt_gaps,
        scaffold_gaps,
        svrg_gaps,
        personal_gaps,
        meta_gaps,
    )
    return {name: gap(*pair) for part in parts for name, *pair in part()}

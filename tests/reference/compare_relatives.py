# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs L2GD, partial methods, agnostic FL and MAPPER beside their papers' loops.

In float64. Only cohorts and the counts of coins are taken from fedblend.
"""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import partial_transcription as partial_paper
import relatives_transcription as paper

import fedblend as fb
import problems
from fedblend.simulation.sampling import cohorts

RATE, ROUNDS, COHORT, SPLIT = 0.2, 9, 4, 2

on = problems.quadratics()
root = jax.random.key(7)
start = np.asarray(on.params)
chosen = cohorts(root, list(range(ROUNDS)), 7, COHORT).tolist()
matrices, vectors = problems.client_matrices(on)
full: dict[str, Any] = {"batch_size": None}


def new_run(algorithm, params=on.params, cohort=COHORT):
    """fedblend's run of the same rounds; its chunks are padded."""
    return fb.simulate(
        algorithm,
        params,
        on.federated_data,
        root,
        rounds=ROUNDS,
        cohort=cohort,
        chunk=3,
        every=1,
    )


def l2gd_gaps():
    n, lam, p = 7, 0.8, 0.4
    run = new_run(fb.algorithms.l2gd(on.loss, RATE, lam=lam, p=p, **full), cohort=n)
    said, coins = [jax.device_get(run.down.extra["l2gd"]) for _ in run], []
    for before, after in pairwise(said):
        coins += [0] * int(before.local) + [1] * int(after.averaging)
    alpha = RATE * n * (1 - p)
    theirs, communications = paper.l2gd(matrices, vectors, start, coins, alpha, lam, p)
    yield "l2gd: personal", np.stack([run.personal(i) for i in range(n)]), theirs
    yield "l2gd: mean", run.shared, theirs.mean(axis=0)
    yield "l2gd: communications", np.float64(ROUNDS), np.float64(communications)
    yield "l2gd: tosses", np.float64(sum(run.server)), np.float64(len(coins))


def fedrep_gaps():
    params = {"body": on.params[:SPLIT], "head": on.params[SPLIT:]}
    algorithm = fb.algorithms.fedrep(
        lambda tree, rows: on.loss(jnp.concatenate([tree["body"], tree["head"]]), rows),
        fb.Work(RATE, steps=3, **full),
        head=lambda path: path == "head",
        head_steps=4,
    )
    run = new_run(algorithm, params).complete()
    settings = (RATE, 4, 3, SPLIT)
    body, heads = paper.fedrep(matrices, vectors, start, chosen, *settings)
    yield "fedrep: body", run.shared["body"], body
    mine = [run.personal(i) for i in range(7)]
    yield "fedrep: heads", np.stack([model["head"] for model in mine]), heads
    yield "fedrep: bodies", np.stack([model["body"] for model in mine])[6], body


def partial_gaps():
    params = {"body": on.params[:SPLIT], "head": on.params[SPLIT:]}
    for order, local, own, settings in (
        ("together", partial_paper.local_sim, {}, (3,)),
        ("alternate", partial_paper.local_alt, {"personal_steps": 4}, (4, 3)),
    ):
        algorithm = fb.partial(
            lambda tree, rows: on.loss(
                jnp.concatenate([tree["body"], tree["head"]]), rows
            ),
            fb.Work(RATE, steps=3, **full),
            personal=["head"],
            order=order,
            personal_rate=RATE / 2,
            **own,
        )
        run = new_run(algorithm, params).complete()
        u, v = start[:SPLIT], start[SPLIT:]
        given = (matrices, vectors, u, v, chosen, (RATE, RATE / 2), *settings)
        body, heads = partial_paper.rounds(local, *given)
        mine = [run.personal(i)["head"] for i in range(7)]
        yield f"partial, {order}: body", run.shared["body"], body
        yield f"partial, {order}: heads", np.stack(mine), heads


def agnostic_gaps():
    for steps in (1, 3):
        algorithm = fb.algorithms.agnostic(
            on.loss, fb.Work(RATE, steps=steps, **full), clients=7, q_rate=0.3
        )
        run = new_run(algorithm).complete()
        settings = (RATE, 0.3, steps)
        x, q = paper.agnostic(matrices, vectors, start, chosen, *settings)
        assert 0 < (q == 0).sum() < 6, "the projection was never tried"
        yield f"agnostic, {steps} steps: model", run.shared, x
        yield f"agnostic, {steps} steps: q", run.down.extra["agnostic"], q


def mapper_gaps():
    train = on.federated_data.train
    rows = [train.rows(client) for client in range(7)]
    weights = np.linspace(0, 1, 5)
    fitted = {"alpha": 0.3, "grid": 5, "held_out": 0.4}
    algorithm = fb.algorithms.mapper(on.loss, fb.Work(RATE, steps=4, **full), **fitted)
    run = new_run(algorithm).complete()
    z, own, alphas = paper.mapper(
        rows, start, chosen, RATE, 4, 0.4, weights, 0.3, train.counts
    )
    assert len(set(alphas.tolist())) > 2, "the grid was never tried"
    states = [run.client(client) for client in range(7)]
    yield "mapper: model", run.shared, z
    yield "mapper: personal", np.stack([state.personal for state in states]), own
    yield "mapper: alpha", np.stack([state.alpha for state in states]), alphas
    mixed = alphas[:, None] * z[None] + (1 - alphas[:, None]) * own
    yield "mapper: mixture", np.stack([run.personal(i) for i in range(7)]), mixed


def gap(ours, theirs) -> float:
    assert np.asarray(ours).dtype == np.float64
    assert np.abs(theirs).max() > 1e-2
    return float(np.abs(np.asarray(ours) - theirs).max())


def gaps() -> dict[str, float]:
    """The largest difference in every comparison."""
    parts = (l2gd_gaps, fedrep_gaps, partial_gaps, agnostic_gaps, mapper_gaps)
    return {name: gap(*pair) for part in parts for name, *pair in part()}

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg, pFedMe and Ditto beside their transcriptions, in float64.

Batches and cohorts are fedblend's; what is done with them is the papers'.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import personalized_transcriptions as paper

import fedblend as fb
import problems
from fedblend import keys
from fedblend.batches import random_rows
from fedblend.simulation.sampling import cohorts

PENALTY, ROUNDS, COHORT, CLIENTS, DIM = 0.1, 5, 4, 7, 3
STEPS = np.array([1, 3, 2, 4, 1, 2, 3])
LAM = np.linspace(0.2, 1.4, CLIENTS)

rng = np.random.default_rng(3)
total = sum(problems.COUNTS)
features = 2 * rng.standard_normal((total, DIM))
signs = np.where(features @ np.ones(DIM) + rng.standard_normal(total) > 0, 1.0, -1.0)
parts = np.split(np.arange(total), np.cumsum(problems.COUNTS)[:-1])
federated_data = fb.federate((features, signs), parts)
train = federated_data.train
start = np.linspace(-0.5, 0.5, DIM)
root = jax.random.key(7)
members = cohorts(root, list(range(ROUNDS)), CLIENTS, COHORT).tolist()
rows = [train.rows(client) for client in range(CLIENTS)]
by_count = paper.Logistic(rows, train.counts, PENALTY)
uniform = paper.Logistic(rows, np.ones(CLIENTS), PENALTY)


def loss(params, rows):
    inputs, targets = rows
    losses = jax.nn.softplus(-targets * (inputs @ params))
    return losses + 0.5 * PENALTY * params @ params


def run(algorithm, weights):
    return fb.simulate(
        algorithm,
        jnp.asarray(start),
        federated_data,
        root,
        rounds=ROUNDS,
        cohort=COHORT,
        chunk=3,
        every=5,
        weights=weights,
    ).complete()


def personal(done):
    return np.stack([done.personal(client) for client in range(CLIENTS)])


def drawn(purpose=None, most=4, size=2):
    """The rows of every step of every client, for one purpose, round by round."""
    table = []
    for number in range(ROUNDS):
        own = [keys.derive(root, "client", number, client) for client in range(CLIENTS)]
        if purpose is not None:
            own = [keys.named(key, purpose) for key in own]
        shards = [train.shard(client) for client in range(CLIENTS)]
        picked = [
            np.asarray(random_rows(shard, key, (most, size)))[: STEPS[client]]
            for client, (shard, key) in enumerate(zip(shards, own, strict=True))
        ]
        table.append(picked)
    return table


def gap(ours, theirs) -> float:
    assert np.asarray(ours).dtype == np.float64
    assert np.abs(theirs - start).max() > 1e-2, "nothing was learned"
    return float(np.abs(np.asarray(ours) - theirs).max())


noisy: dict[str, Any] = {"steps": STEPS, "batch_size": 2}


def perfedavg_gaps():
    """The whole run with exact products; of the others one client's first round."""
    outer, inner, curved = drawn(), drawn("inner"), drawn("hessian")
    batches = [
        [list(zip(*three, strict=True)) for three in zip(*each, strict=True)]
        for each in zip(inner, outer, curved, strict=True)
    ]
    settings: dict[str, Any] = {"inner_rate": 0.2, "delta": 0.1, "adapt_steps": 2}
    numbers = (0.2, 0.4)
    done = run(
        fb.algorithms.perfedavg(loss, fb.Work(0.4, **noisy), **settings), "uniform"
    )
    w = paper.perfedavg(uniform, start, members, *numbers, paper.exact, 0.1, batches)
    yield "perfedavg, exact: model", done.shared, w
    own = [keys.derive(root, "personal", ROUNDS, client) for client in range(CLIENTS)]
    tuning = [
        np.asarray(
            random_rows(train.shard(client), keys.named(key, "finetune"), (2, 2))
        )
        for client, key in enumerate(own)
    ]
    models = paper.adapted(uniform, w, 0.2, tuning)
    yield "perfedavg, exact: personal", personal(done), models
    forms = {"differences": paper.hessian_free, "none": paper.first_order}
    for name, product in forms.items():
        algorithm = fb.algorithms.perfedavg(
            loss, fb.Work(0.4, **noisy), hessian=name, **settings
        )
        down = fb.Down(jnp.asarray(start), jnp.zeros((), jnp.int32))
        key, shard = keys.derive(root, "client", 0, 3), jax.device_put(train.shard(3))
        up, _ = jax.jit(algorithm.client)(down, (), shard, key)
        w = paper.perfedavg(by_count, start, [[3]], *numbers, product, 0.1, batches)
        yield f"perfedavg, {name}: one client", start + up.delta, w


def pfedme_gaps():
    settings = {"lam": 1.5, "inner_rate": 0.25, "inner_steps": 3, "server_rate": 0.8}
    done = run(fb.algorithms.pfedme(loss, fb.Work(0.3, **noisy), **settings), "uniform")
    w, theta = paper.pfedme(uniform, start, members, 1.5, 0.3, 0.25, 3, 0.8, drawn())
    yield "pfedme: model", done.shared, w
    yield "pfedme: personal", personal(done), theta


def ditto_gaps():
    averaged = fb.fedavg(loss, fb.Work(0.3, **noisy))
    done = run(fb.ditto(averaged, loss, fb.Work(0.2, **noisy), lam=LAM), "by_count")
    own = drawn("ditto")
    w, v = paper.ditto(by_count, start, members, LAM, 0.3, 0.2, drawn(), own)
    yield "ditto: model", done.shared, w
    yield "ditto: personal", personal(done), v


def gaps() -> dict[str, float]:
    """The largest difference in every comparison."""
    parts = (perfedavg_gaps, pfedme_gaps, ditto_gaps)
    return {name: gap(*pair) for part in parts for name, *pair in part()}

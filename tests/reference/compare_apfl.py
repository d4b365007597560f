# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Runs APFL beside its transcription, in float64."""

from typing import Any, NamedTuple

import apfl_transcription as paper
import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
import problems
from fedblend import keys, mixing
from fedblend.batches import part, random_rows
from fedblend.losses import objective, squared_error
from fedblend.simulation.sampling import cohorts
from fedblend_reproductions.apfl.averaged import apfl_averaged
from fedblend_reproductions.apfl.theory import Decay

COUNTS, DIM, RATE, ROUNDS, COHORT = (5, 2, 6, 3, 7), 3, 0.2, 7, 3
CLIENTS, STEPS, SIZE, HELD = len(COUNTS), 4, 2, 0.4
LOCAL = np.array([0.3, 0.9, 0.5, 0.01, 0.7])
"""The paper's alpha of every client, the weight of v."""
root = jax.random.key(3)
chosen = cohorts(root, list(range(ROUNDS)), CLIENTS, COHORT).tolist()
work: dict[str, Any] = {"steps": STEPS, "batch_size": SIZE}


class Line(NamedTuple):
    """Parameters of two tensors."""

    weight: jax.Array
    bias: jax.Array


def apply(params: Line, inputs):
    return inputs @ params.weight + params.bias


rng = np.random.default_rng(0)
rows = rng.standard_normal((sum(COUNTS), DIM)), rng.standard_normal(sum(COUNTS))
loss = squared_error(apply)
federated_data = fb.federate(
    rows, np.split(np.arange(len(rows[1])), np.cumsum(COUNTS)[:-1])
)
train = federated_data.train
own_rows = [train.rows(i) for i in range(CLIENTS)]
by_hand = paper.LeastSquares(
    [np.column_stack([x, np.ones(len(x))]) for x, _ in own_rows],
    [np.asarray(y) for _, y in own_rows],
)
begin = np.array([0.1, -0.2, 0.3, 0.4])


def line(vector) -> Line:
    return Line(jnp.asarray(vector[:DIM]), jnp.asarray(vector[DIM:]))


def flat(params: Line):
    return np.concatenate([params.weight, params.bias], axis=-1)


def run(algorithm):
    return fb.simulate(
        algorithm,
        line(begin),
        federated_data,
        root,
        rounds=ROUNDS,
        cohort=COHORT,
        every=ROUNDS,
    ).complete()


def drawn(purpose=None, low=0.0, high=1.0):
    """The batches that fedblend draws, as numbers of a client's rows."""
    found = []
    for number in range(ROUNDS):
        of_round = []
        for i in range(CLIENTS):
            key = keys.derive(root, "client", number, i)
            key = key if purpose is None else keys.named(key, purpose)
            shard = part(train.shard(i), low, high)
            first = int(np.floor(low * COUNTS[i]))
            index = np.asarray(random_rows(shard, key, (STEPS, SIZE))) + first
            none = [np.zeros(0, int)] * STEPS
            of_round.append(list(index) if shard.count else none)
        found.append(of_round)
    return found


def compared(name, done, w, v, a):
    """The three parts of APFL's outcome; ours is one minus the paper's alpha."""
    states = [done.client(i) for i in range(CLIENTS)]
    yield f"{name}: shared", flat(done.shared), w
    yield f"{name}: personal", np.stack([flat(s.personal) for s in states]), v
    yield f"{name}: alpha", 1 - np.stack([s.alpha for s in states]), a


def paper_gaps():
    cases: dict[str, tuple[Any, ...]] = {
        "step": ({}, {}),
        "round": ({"aggregated": False}, {}),
        "step, outputs, own rate": (
            {"mix": mixing.outputs, "alpha_rate": 1.5},
            {"rate": 1.5},
        ),
        "step, fresh, held out": (
            {"held_out": HELD, "fresh": True},
            {
                "batches": drawn(None, HELD, 1.0),
                "own": drawn("fresh batch", HELD, 1.0),
                "judge": drawn("held-out batch", 0.0, HELD),
            },
        ),
    }
    for name, (ours, theirs) in cases.items():
        when: Any = name.partition(",")[0]
        done = run(
            fb.apfl(loss, fb.Work(RATE, **work), alpha=1 - LOCAL, learn=when, **ours)
        )
        said = {"batches": drawn(), "eta": RATE, "a": LOCAL, "when": when, **theirs}
        w, v, a, last = paper.apfl(by_hand, begin, chosen, **said)
        yield from compared(f"apfl, {name}", done, w, v, a)
        if when == "round":
            deployed = np.stack([flat(done.personal(i)) for i in range(CLIENTS)])
            theirs = a[:, None] * v + (1 - a[:, None]) * last
            yield "apfl, before aggregation", deployed, theirs


def averaged_gaps():
    decay = Decay(3.0, 12.0)
    schedule = fb.Scheduled(decay, "step")
    done = run(
        apfl_averaged(loss, fb.Work(schedule, **work), alpha=1 - LOCAL, shift=12.0)
    )
    w, w_hat, v_hat = paper.averaged(
        by_hand, begin, chosen, drawn(), lambda t: 3 / (t + 12), LOCAL, 12.0
    )
    yield "averaged: shared", flat(done.shared), w
    yield "averaged: w_hat", flat(done.down.extra["apfl"].model), w_hat
    deployed = np.stack([flat(done.personal(i)) for i in range(CLIENTS)])
    yield "averaged: v_hat", deployed, v_hat


def slope_gaps():
    """One step's change of alpha against central differences, on a network."""
    network = fb.models.mlp(2, 3, hidden=(4,), activation="tanh", dtype=jnp.float64)
    cross = fb.losses.cross_entropy(network.apply)
    on = problems.classes().federated_data.train
    shard, whole = jax.device_put(on.shard(4)), fb.Batch(on.rows(4))
    one, two = (network.init(jax.random.key(seed)) for seed in (0, 1))
    down, slopes = fb.Down(one, jnp.zeros((), jnp.int32)), []
    for name, mix in (("parameters", mixing.parameters), ("outputs", mixing.outputs)):
        algorithm = fb.apfl(
            cross, fb.Work(0.01, steps=1, batch_size=None), alpha=0.4, mix=mix
        )
        _, state = algorithm.enroll(one, shard, root)
        mine = state._replace(personal=two)
        _, after = jax.jit(algorithm.client)(down, mine, shard, root)
        value = jax.jit(lambda a, mix=mix: objective(cross, mix(a, one, two), whole))
        slopes.append((state.alpha - after.alpha) / 0.01)
        central = (value(0.4 + 1e-5) - value(0.4 - 1e-5)) / 2e-5
        yield f"slope, {name}", float(abs(slopes[-1] - central))
    yield "slopes apart", float(abs(slopes[0] - slopes[1]))


def limit_gaps():
    """How far long training stays from each client's own minimizer."""
    on = problems.quadratics()
    matrices, vectors = problems.client_matrices(on)
    alone = np.stack(
        [np.linalg.solve(a, b) for a, b in zip(matrices, vectors, strict=True)]
    )
    alpha = np.array([0.0, 0.25, 0.5, 0.6, 0.5, 0.25, 0.6])
    for steps, rates in ((1, [0.4]), (5, [0.08, 0.02])):

        def build(rate, steps=steps):
            work = {"steps": steps, "batch_size": None}
            return fb.apfl(on.loss, fb.Work(rate, **work), alpha=alpha, learn="fixed")

        done = fb.simulate(
            build,
            on.params,
            on.federated_data,
            root,
            rounds=1000,
            every=1000,
            over=jnp.asarray(rates),
        ).complete()
        own = np.stack([done.personal(i) for i in range(7)], axis=1)
        for rate, models in zip(rates, own, strict=True):
            yield f"limit, {steps} steps, rate {rate}", np.abs(models - alone).max()


def gap(ours, theirs) -> float:
    assert np.asarray(ours).dtype == np.float64
    assert np.shape(ours) == np.shape(theirs), (np.shape(ours), np.shape(theirs))
    return float(np.abs(np.asarray(ours) - theirs).max())


def gaps() -> dict[str, float]:
    """The largest difference in every comparison."""
    found = {name: gap(*pair) for name, *pair in (*paper_gaps(), *averaged_gaps())}
    return found | dict(slope_gaps()) | dict(limit_gaps())

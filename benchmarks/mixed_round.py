# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a loss at the server adds to a round, beside its own steps alone.

20 clients with 300 random rows each, two hidden layers of 200, 10 steps of 20 rows, and
10 central steps of 400 rows. Rounds are timed in turns, and least times compared: (a
round of Mixed FL - a round of FedAvg) / the same central steps alone. Prints JSON.
"""

import json
import sys
import time

import jax
import numpy as np

import fedblend as fb
from fedblend.local import resolve
from fedblend.transforms import central_loss
from fedblend.transforms.mixed_fl import central_steps

CLIENTS, ROWS, CENTRAL, BLOCK, BLOCKS = 20, 300, 4000, 10, 6
STEPS, BATCH, CENTRAL_BATCH, RATE = 10, 20, 400, 0.1


def rows(number, seed):
    draws = np.random.default_rng(seed)
    images = draws.random((number, 784), np.float32)
    return images, draws.integers(0, 10, number)


def central_alone(mean_gradient, params, held):
    """The central steps of a round, compiled."""

    @jax.jit
    def steps(params, key):
        rule = resolve(RATE, 0, STEPS)
        return central_steps(mean_gradient, params, held, key, rule, STEPS)[0]

    keys = jax.random.split(jax.random.key(0), BLOCK)
    jax.block_until_ready(steps(params, keys[0]))

    def block():
        here, begun = params, time.perf_counter()
        for key in keys:
            here = steps(here, key)
        jax.block_until_ready(here)
        return (time.perf_counter() - begun) / BLOCK

    return block


def main():
    parts = fb.partition.contiguous(CLIENTS * ROWS, CLIENTS)
    federated_data = fb.federate(rows(CLIENTS * ROWS, 0), parts)
    held = fb.shard_of(rows(CENTRAL, 1))
    model = fb.models.mlp(784, 10)
    params = model.init(jax.random.key(0))
    loss = fb.losses.cross_entropy(model.apply)
    mean_gradient = central_loss.row_loss(loss, CENTRAL_BATCH)
    fedavg = fb.fedavg(loss, fb.Work(RATE, steps=STEPS, batch_size=BATCH))
    algorithms = {"fedavg": fedavg} | {
        how: fb.transforms.mixed_fl(fedavg, mean_gradient, how=how, steps=STEPS)
        for how in ("parallel", "one_way", "two_way")
    }
    runs = {
        name: iter(
            fb.simulate(
                algorithm,
                params,
                federated_data,
                jax.random.key(0),
                rounds=BLOCK * (BLOCKS + 1),
                every=BLOCK,
                central=None if algorithm is fedavg else held,
            )
        )
        for name, algorithm in algorithms.items()
    }
    alone = central_alone(mean_gradient, params, held)
    for run in runs.values():
        next(run)  # the state before the first round
        next(run)  # warm
    times = {name: [] for name in (*runs, "central steps alone")}
    for _ in range(BLOCKS):
        for name, run in runs.items():
            times[name].append(next(run).seconds / BLOCK)
        times["central steps alone"].append(alone())
    least = {name: min(seconds) for name, seconds in times.items()}
    own = least["central steps alone"]
    added = {
        name: (least[name] - least["fedavg"]) / own
        for name in algorithms
        if name != "fedavg"
    }
    found = {"seconds": times, "added_to_central_steps_alone": added}
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

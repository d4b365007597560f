# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A round of APFL and its relatives beside one of FedAvg, on the work of its Table 2.

100 clients with 600 random images each, two hidden layers of 200, 20 steps of 20 rows.
Blocks of rounds are timed in turns, and the least times compared. Prints JSON.
"""

import json
import sys
from functools import partial

import jax
import numpy as np

import fedblend as fb

CLIENTS, ROWS, BLOCK, BLOCKS = 100, 600, 2, 4
WORK = {"steps": 20, "batch_size": 20}


def problem():
    draws = np.random.default_rng(0)
    images = draws.random((CLIENTS * ROWS, 784), np.float32)
    labels = draws.integers(0, 10, CLIENTS * ROWS)
    parts = fb.partition.contiguous(CLIENTS * ROWS, CLIENTS)
    model = fb.models.mlp(784, 10)
    return fb.federate((images, labels), parts), model


def algorithms(loss):
    apfl = partial(fb.apfl, loss, fb.Work(0.1, **WORK), alpha=0.5)
    fedavg = fb.fedavg(loss, fb.Work(0.1, **WORK))
    return {
        "fedavg": fedavg,
        "apfl, fixed alpha": apfl(learn="fixed"),
        "apfl, learned alpha": apfl(),
        "apfl, held-out alpha": apfl(held_out=0.1, alpha_rate=0.001),
        "ditto": fb.ditto(fedavg, loss, fb.Work(0.1, **WORK), lam=0.1),
        "pfedme, 5 inner steps": fb.algorithms.pfedme(
            loss, fb.Work(0.01, **WORK), lam=15.0, inner_rate=0.03, inner_steps=5
        ),
        "perfedavg, no Hessian": fb.algorithms.perfedavg(
            loss, fb.Work(0.1, **WORK), inner_rate=0.1, hessian="none"
        ),
    }


def main():
    federated_data, model = problem()
    loss = fb.losses.cross_entropy(model.apply)
    runs = {
        name: iter(
            fb.simulate(
                algorithm,
                model.init,
                federated_data,
                jax.random.key(0),
                rounds=BLOCK * (BLOCKS + 1),
                every=BLOCK,
            )
        )
        for name, algorithm in algorithms(loss).items()
    }
    for run in runs.values():
        next(run)  # the state before the first round
        next(run)  # warm
    times = {name: [] for name in runs}
    for _ in range(BLOCKS):
        for name, run in runs.items():
            times[name].append(next(run).seconds / BLOCK)
    least = {name: min(seconds) for name, seconds in times.items()}
    json.dump(
        {
            "seconds": times,
            "to_fedavg": {name: least[name] / least["fedavg"] for name in least},
        },
        sys.stdout,
        indent=1,
    )


if __name__ == "__main__":
    main()

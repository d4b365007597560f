# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Digests of runs, one line of JSON each; for processes with devices of their own.

``python devices_alike.py NAMES DEVICES [NAME DEVICES FOLDER]``: these cases on these
numbers of devices. Then, in a folder, a run of a case is interrupted on the first
number after one block, and goes on from its checkpoint on the others.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedblend as fb
from fedblend.simulation import checkpoint
from fedblend.transforms.central_loss import row_loss

CLIENTS, COHORT = 22, 19


def problem():
    """Clients of uneven size, and a small network."""
    rng = np.random.default_rng(0)
    counts = rng.integers(2, 9, CLIENTS)
    labels = rng.integers(0, 3, counts.sum()).astype(np.int32)
    inputs = rng.standard_normal((len(labels), 5)).astype(np.float32)
    parts = np.split(np.arange(len(labels)), np.cumsum(counts)[:-1])
    return fb.federate((inputs + labels[:, None], labels), parts)


DATA, MODEL = problem(), fb.models.mlp(5, 3, hidden=[7])
LOSS = fb.losses.cross_entropy(MODEL.apply)
WORK = fb.Work(0.1, steps=3, batch_size=2)
FEDAVG = fb.fedavg(LOSS, WORK)
FLIX = fb.flix(
    LOSS,
    lambda loss: fb.fedavg(loss, WORK),
    alpha=0.6,
    local=fb.solvers.gradient_descent(LOSS, 10.0, most=3),
)
CASES: dict[str, fb.Algorithm] = {
    "fedavg": FEDAVG,
    "scaffold": fb.scaffold(LOSS, WORK),
    "apfl": fb.apfl(LOSS, WORK, alpha=0.5),
    "flix_diana": fb.transforms.diana(FLIX, fb.compress.rand_k(20)),
    "two_way": fb.transforms.mixed_fl(FEDAVG, row_loss(LOSS, 4), how="two_way"),
}


def start(name: str, devices: int, **settings):
    """A run of a case on so many devices: chunks of two, ten of them, one padded."""
    central = fb.shard_of(jax.tree.map(lambda leaf: leaf[:8], DATA.train.examples))
    chosen: dict[str, Any] = {
        "rounds": 4,
        "cohort": COHORT,
        "every": 2,
        "chunk": 2,
        "central": central if name == "two_way" else None,
        **settings,
    }
    algorithm, key = CASES[name], jax.random.key(1)
    return fb.simulate(algorithm, MODEL.init, DATA, key, devices=devices, **chosen)


def digest(run) -> str:
    """Of both sides' states, and of all personal models."""
    run.complete()
    models = [run.personal(client) for client in range(CLIENTS)]
    found = hashlib.sha256()
    for leaf in jax.tree.leaves((run.down, run.server, run.client_states(), models)):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def interrupted(name: str, numbers: str, folder: str) -> list[str]:
    """The digests of a run that stopped after a block, and of those that went on."""
    first, *others = map(int, numbers.split(","))
    path, begun = Path(folder) / name, start(name, first)
    blocks = iter(begun)
    for _ in range(2):  # what is known before round 0, and a block
        next(blocks)
    checkpoint.save(path, begun)
    resumed = [start(name, number) for number in others]
    for run in resumed:
        checkpoint.restore(path, run)
    return [digest(run) for run in (begun, *resumed)]


def main(names: str, numbers: str, *stopped: str) -> None:
    """Print what the arguments ask for."""
    for name in names.split(","):
        found = [digest(start(name, int(number))) for number in numbers.split(",")]
        print(json.dumps([name, *found]), flush=True)
    if stopped:
        print(json.dumps(["interrupted", *interrupted(*stopped)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

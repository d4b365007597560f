# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What uneven clients cost: client-steps computed over those needed, and time by turns.

Rows of 10 classes are divided among clients by Dirichlet(0.1), one epoch in batches of
10, all clients in every round and mapped together. "longest" runs all of them as long
as the longest, "seats" as ``uneven_loop`` does. The counts of steps follow from the
sizes; seconds are the least of a round, the two ways by turns in one process.

    PYTHONPATH=src python benchmarks/uneven_clients.py --rows 6000 --out uneven.json
"""

import argparse
import hashlib
import heapq
import json
import math
import time
from pathlib import Path

import jax
import numpy as np

import fedblend as fb
from fedblend import uneven_loop

BATCH, RATE = 10, 0.05


def problem(clients: int, rows: int, seed: int) -> fb.FederatedData:
    """Random images; the number of rows of a client is Dirichlet(0.1) in each class."""
    draws = np.random.default_rng(seed)
    shares = draws.dirichlet(np.full(clients, 0.1), size=10).sum(axis=0) / 10
    counts = np.maximum((shares * rows).astype(int), 1)
    images = draws.random((counts.sum(), 28, 28), np.float32)
    labels = draws.integers(0, 10, counts.sum()).astype(np.int32)
    edges = np.cumsum(counts)[:-1]
    return fb.federate((images, labels), np.split(np.arange(counts.sum()), edges))


def steps_computed(own: np.ndarray) -> dict[str, tuple[float, int]]:
    """Client-steps computed over those needed, and steps one after another."""
    seats = max(math.ceil(own.mean() / own.max() * len(own) - 1e-6), 2)
    busy = [0] * seats
    for steps in sorted(own.tolist(), reverse=True):
        heapq.heapreplace(busy, busy[0] + steps)
    turns = max(busy)
    longest = int(own.max())
    return {
        "longest": (len(own) * longest / own.sum(), longest),
        "seats": (seats * turns / own.sum(), turns),
    }


def compiled(model: fb.models.Model, data: fb.FederatedData, way: str):
    """A run and its rounds, one by one, all clients in one chunk."""
    uneven_loop.EVEN = 0.0 if way == "longest" else EVEN
    loss = fb.losses.cross_entropy(model.apply)
    work = fb.Work(RATE, fb.Epochs(1), BATCH)
    run = fb.simulate(
        fb.fedavg(loss, work),
        model.init,
        data,
        jax.random.key(0),
        rounds=1_000_000,
        every=1,
        chunk=data.clients,
    )
    records = iter(run)
    for _ in range(3):  # the start, and two rounds
        next(records)
    return run, records


EVEN = uneven_loop.EVEN


def measure(name: str, clients: int, rows: int, turns: int, seed: int) -> dict:
    shape = (28, 28)
    model = {
        "softmax": lambda: fb.models.softmax(784, 10),
        "mlp": lambda: fb.models.mlp(784, 10),
        "cnn": lambda: fb.models.cnn(shape, 10),
    }[name]()
    data = problem(clients, rows, seed)
    own = -(-data.train.counts // BATCH)
    runs = {way: compiled(model, data, way) for way in ("longest", "seats")}
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(turns):
        for way, (run, records) in runs.items():
            begun = time.perf_counter()
            next(records)
            run.wait()
            seconds[way].append(time.perf_counter() - begun)
    found: dict = {"model": name, "clients": clients, "rows": data.train.total}
    for way, (waste, longest) in steps_computed(own).items():
        leaves = jax.tree.leaves(runs[way][0].shared)
        bits = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
        found[way] = {
            "waste": round(waste, 3),
            "steps_in_line": longest,
            "least_s": round(min(seconds[way]), 4),
            "compile_s": round(runs[way][0].compile_seconds, 2),
            "sha256": bits.hexdigest()[:12],
        }
    pairs = zip(seconds["seats"], seconds["longest"], strict=True)
    found["time_ratio"] = round(float(np.median([a / b for a, b in pairs])), 3)
    found["device"] = jax.devices()[0].device_kind
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="softmax,mlp,cnn")
    parser.add_argument("--clients", default="20,100")
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    table = []
    for name in given.models.split(","):
        for clients in map(int, given.clients.split(",")):
            row = measure(name, clients, given.rows, given.turns, given.seed)
            print(json.dumps(row), flush=True)
            table.append(row)
            if given.out:
                given.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

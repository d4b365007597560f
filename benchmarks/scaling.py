# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The price of a round as the federation grows: it should not depend on its size.

SCAFFOLD, whose clients remember a control variate each, on softmax regression with 20
inputs, 10 classes and 8 examples a client; ten clients a round, drawn from 100 up to
100,000. Every size has its own process, for the sake of its peak memory. Measures are
left out, bookkeeping is not: what is timed is the wait for the next record.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np

import work

SIZES = (100, 1_000, 10_000, 100_000)
STORES = ("host", "disk")
COHORT, EXAMPLES, INPUTS, CLASSES, BLOCK = 10, 8, 20, 10, 10


def one_size(clients: int, store: str, repeats: int) -> dict:
    """Seconds a round, and memory, with this many clients."""
    import jax

    import fedblend as fb

    rng = np.random.default_rng(0)
    total = clients * EXAMPLES
    inputs = rng.standard_normal((total, INPUTS), np.float32)
    labels = rng.integers(CLASSES, size=total).astype(np.int32)
    bounds = pairwise(range(0, total + 1, EXAMPLES))
    federation = fb.federate((inputs, labels), [np.arange(*bound) for bound in bounds])
    model = fb.models.softmax(INPUTS, CLASSES)
    algorithm = fb.scaffold(
        fb.objectives.cross_entropy(model.apply), 0.1, steps=5, batch_size=4
    )
    start = time.perf_counter()
    run = fb.simulate(
        algorithm,
        model.init(jax.random.key(0)),
        federation,
        jax.random.key(1),
        rounds=BLOCK * (repeats + 2),
        cohort=COHORT,
        every=BLOCK,
        store=store,
    )
    records = iter(run)
    next(records)
    next(records)
    first = time.perf_counter() - start
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        next(records)
        seconds.append((time.perf_counter() - start) / BLOCK)
    return {
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "first": first,
        "megabytes": round(work.peak_megabytes()),
    }


def table(repeats: int) -> None:
    """Every size and store in turn, as a table."""
    print("| store | clients | ms a round | to 100 clients | start s | peak MB |")
    print("|---|---|---|---|---|---|")
    for store in STORES:
        smallest = None
        for clients in SIZES:
            command = [sys.executable, __file__, "--repeats", str(repeats)]
            command += ["--clients", str(clients), "--store", store]
            output = subprocess.run(
                command, stdout=subprocess.PIPE, check=True, env=work.environment()
            )
            found = json.loads(output.stdout)
            smallest = smallest or found["seconds"]
            print(
                f"| {store} | {clients:,} | {1000 * found['seconds']:.2f} "
                f"| {found['seconds'] / smallest:.2f} | {found['first']:.1f} "
                f"| {found['megabytes']} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, help="only this size; prints JSON")
    parser.add_argument("--store", choices=STORES, default="host")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    if options.clients:
        found = one_size(options.clients, options.store, options.repeats)
        print(json.dumps(found))
    else:
        table(options.repeats)

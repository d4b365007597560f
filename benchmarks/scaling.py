# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The price of a round as the federation grows: it should not depend on its size.

SCAFFOLD, whose clients remember a control variate each, on softmax regression with 20
inputs, 10 classes and 8 examples a client; ten clients a round, drawn from 100 up to
100,000. Every size has its own process, for the sake of its peak memory. Measures are
left out, bookkeeping is not: what is timed is the wait for the next record.
"""

import argparse
from functools import partial
from itertools import pairwise

import jax
import numpy as np

import engine
import fedblend as fb
import work
from turns import PYTHON, Peer, take_turns

FILE = "scaling.py"

SIZES = (100, 1_000, 10_000, 100_000)
STORES = ("host", "disk")
COHORT, EXAMPLES, INPUTS, CLASSES, BLOCK = 10, 8, 20, 10, 10


def prepare(clients: int, store: str):
    rng = np.random.default_rng(0)
    total = clients * EXAMPLES
    inputs = rng.standard_normal((total, INPUTS), np.float32)
    labels = rng.integers(CLASSES, size=total).astype(np.int32)
    bounds = pairwise(range(0, total + 1, EXAMPLES))
    federated_data = fb.federate(
        (inputs, labels), [np.arange(*bound) for bound in bounds]
    )
    model = fb.models.softmax(INPUTS, CLASSES)
    algorithm = fb.scaffold(
        fb.losses.cross_entropy(model.apply), fb.Work(0.1, steps=5, batch_size=4)
    )
    run = fb.simulate(
        algorithm,
        model.init(jax.random.key(0)),
        federated_data,
        jax.random.key(1),
        rounds=engine.FOREVER,
        cohort=COHORT,
        every=BLOCK,
        store=store,
    )
    records = iter(run)
    next(records)

    def advance() -> None:
        next(records)

    return advance


def table(repeats: int) -> None:
    """All sizes and stores, taking turns."""
    peers = [
        Peer(f"{store} | {clients:,}", PYTHON, FILE, "--clients", clients, *how)
        for store in STORES
        for clients in SIZES
        if (how := ("--store", store, "--hold"))
    ]
    found = take_turns(peers, repeats)
    print("| store | clients | ms a round | to 100 | least ms | to 100 | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for place, peer in enumerate(peers):
        base = found[place // len(SIZES) * len(SIZES)]
        this = found[place]
        print(
            f"| {peer.name} | {1000 * this.median:.2f} | {this.ratio_to(base):.2f} "
            f"| {1000 * this.least:.2f} | {this.least / base.least:.2f} "
            f"| {this.summary['megabytes']} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, help="only this size; prints JSON")
    parser.add_argument("--store", choices=STORES, default="host")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--hold", action="store_true", help="take turns, by stdin")
    given = parser.parse_args()
    if given.clients:
        work.measure(
            partial(prepare, given.clients, given.store),
            block=BLOCK,
            repeats=given.repeats,
            hold=given.hold,
        )
    else:
        table(given.repeats)

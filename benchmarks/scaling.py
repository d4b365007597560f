# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The price of a round as the federation grows: it should not depend on its size.

A hundred clients a round on softmax regression with 10 classes and 8 examples a client,
of 100 up to ten million: FedAvg, whose clients remember nothing (20 inputs); SCAFFOLD,
whose clients remember a control variate each; and APFL with a personal model of 10,010
weights each (1,000 inputs), up to a million. Clients beyond the first thousand have the
examples of others. Every size has its own process, for the sake of its peak memory.
Measures are left out, bookkeeping is not: what is timed is the wait for the next
record.
"""

import argparse
from functools import partial

import jax
import numpy as np

import engine
import fedblend as fb
import work
from fedblend.data.federated import FederatedData, Shards
from turns import PYTHON, Peer, take_turns

FILE = "scaling.py"

SIZES = (100, 10_000, 1_000_000)
KINDS = {"none": (*SIZES, 10_000_000), "host": SIZES, "disk": SIZES, "models": SIZES}
"""What clients remember: nothing; a control variate, in memory or on disk; a model."""
COHORT, EXAMPLES, CLASSES, BLOCK, DIFFERENT = 100, 8, 10, 10, 1000


def prepare(clients: int, kind: str):
    rng = np.random.default_rng(0)
    inputs = 1000 if kind == "models" else 20
    total = DIFFERENT * EXAMPLES
    rows = (
        rng.standard_normal((total, inputs), np.float32),
        rng.integers(CLASSES, size=total).astype(np.int32),
    )
    starts = np.arange(clients) % DIFFERENT * EXAMPLES
    train = Shards(rows, starts, np.full(clients, EXAMPLES))
    model = fb.models.softmax(inputs, CLASSES)
    loss = fb.losses.cross_entropy(model.apply)
    step = fb.Work(0.1, steps=5, batch_size=4)
    algorithm = {
        "none": lambda: fb.fedavg(loss, step),
        "models": lambda: fb.apfl(loss, step, alpha=0.5),
    }.get(kind, lambda: fb.scaffold(loss, step))()
    run = fb.simulate(
        algorithm,
        model.init(jax.random.key(0)),
        FederatedData(train),
        jax.random.key(1),
        rounds=engine.FOREVER,
        cohort=COHORT,
        every=BLOCK,
        store={"none": "auto", "models": "disk"}.get(kind, kind),
    )
    records = iter(run)
    next(records)

    def advance() -> None:
        next(records)

    return advance


def table(repeats: int, kinds: list[str]) -> None:
    """All sizes of each kind, taking turns."""
    print("| state | clients | ms a round | to 100 | least ms | to 100 | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for kind in kinds:
        peers = [
            Peer(
                f"{kind} | {n:,}",
                PYTHON,
                FILE,
                "--clients",
                n,
                "--kind",
                kind,
                "--hold",
            )
            for n in KINDS[kind]
        ]
        found = take_turns(peers, repeats)
        for peer, this in zip(peers, found, strict=True):
            print(
                f"| {peer.name} | {1000 * this.median:.2f} "
                f"| {this.ratio_to(found[0]):.2f} | {1000 * this.least:.2f} "
                f"| {this.least / found[0].least:.2f} "
                f"| {this.summary['megabytes']} |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, help="only this size; prints JSON")
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--hold", action="store_true", help="take turns, by stdin")
    given = parser.parse_args()
    if given.clients:
        work.measure(
            partial(prepare, given.clients, given.kind[0]),
            block=BLOCK,
            repeats=given.repeats,
            hold=given.hold,
        )
    else:
        table(given.repeats, given.kind)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What personal models cost a round: APFL over FedAvg, by the number of clients.

The CIFAR-10 card: a CNN of 1,626,442 weights, 50 images a client, 50 clients a round, 5
steps of batch 10; random pixels, for only time is of interest. Clients beyond the first
thousand have the images of others. The store is chosen by the free memory unless given:
``python stores.py --clients 1000 20000``. FedAvg and APFL take turns in one process;
the first blocks, in which everybody is new, are left out.
"""

import argparse
import statistics
import time

import jax
import numpy as np

import fedblend as fb
from fedblend.data.federated import FederatedData, Shards

IMAGES, COHORT, DIFFERENT, FOREVER = 50, 50, 1000, 10**6


def prepare(name: str, clients: int, every: int, store: str, size: int):
    """A function that computes a block and waits for it, and the run."""
    rng = np.random.default_rng(0)
    different = min(clients, DIFFERENT)
    pixels = rng.random((different * IMAGES, size, size, 3), np.float32)
    labels = rng.integers(10, size=different * IMAGES).astype(np.int32)
    starts = np.arange(clients) % different * IMAGES
    train = Shards((pixels, labels), starts, np.full(clients, IMAGES))
    model = fb.models.large_cnn((size, size, 3), 10)
    work = fb.Work(0.1, steps=5, batch_size=10)
    loss = fb.losses.cross_entropy(model.apply)
    made = fb.fedavg(loss, work) if name == "fedavg" else fb.apfl(loss, work, alpha=0.5)
    run = fb.simulate(
        made,
        model.init(jax.random.key(0)),
        FederatedData(train),
        jax.random.key(1),
        rounds=FOREVER,
        cohort=min(COHORT, clients),
        every=every,
        store=store,
    )
    records = iter(run)
    next(records)

    def advance() -> None:
        next(records)
        jax.block_until_ready(run.down.shared)

    return advance, run


def main(clients, every, repeats, warm, store, size) -> None:
    base, _ = prepare("fedavg", min(clients), every, "auto", size)
    base()
    for number in clients:
        advance, run = prepare("apfl", number, every, store, size)
        for _ in range(warm):
            advance()
        seconds = []
        for _ in range(repeats):
            pair = []
            for step in (base, advance):
                begun = time.perf_counter()
                step()
                pair.append((time.perf_counter() - begun) / every * 1000)
            seconds.append(pair)
        plain, personal = (
            statistics.median(column) for column in zip(*seconds, strict=True)
        )
        print(
            f"{number} clients, store {run.store_kind}: FedAvg {plain:.2f} ms a round, "
            f"APFL {personal:.2f}, ratio {personal / plain:.2f}",
            flush=True,
        )
        del advance, run


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 20_000])
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--store", default="auto")
    parser.add_argument("--size", type=int, default=32, help="of images")
    main(**vars(parser.parse_args()))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds with noise over rounds without it: for rows, and for the sum of a round.

Ten clients with digits. Rows have the noise that nodes add by default, in 1 and 5 local
steps of a linear model of 650 weights and a network of 55,210. The noise of a sum is
from the operating system, over that from a seed. Blocks of both kinds alternate; a line
has medians of three, in CPU seconds of all threads, so that other work on the machine
counts little.
"""

import time
from collections.abc import Iterator

import jax
import numpy as np

import fedblend as fb
from fedblend.config.tables.privacy import ProtectRows

CLIENTS, ROUNDS, BLOCKS = 10, 10, 3


def blocks_of(algorithm, model, federated_data) -> Iterator:
    """The blocks of a run after the first two, which compile."""
    run = fb.simulate(
        algorithm,
        model.init,
        federated_data,
        jax.random.key(0),
        rounds=ROUNDS * (BLOCKS + 2),
        every=ROUNDS,
    )
    blocks = iter(run)
    next(blocks)
    next(blocks)
    return blocks


def compare(name: str, one: Iterator, other: Iterator) -> None:
    """Print what a round takes in both runs, whose blocks alternate."""
    seconds = []
    for _ in range(BLOCKS):
        for blocks in (one, other):
            begun = time.process_time()
            next(blocks)
            seconds.append((time.process_time() - begun) / ROUNDS)
    first, second = np.reshape(seconds, (BLOCKS, 2)).T
    print(
        f"{name}: {1e3 * np.median(first):.2f} ms a round, with noise "
        f"{1e3 * np.median(second):.2f} ms, {np.median(second / first):.2f} times",
        flush=True,
    )


def main() -> None:
    digits = fb.datasets.load("digits")
    parts = fb.partition.iid(len(digits.rows[1]), CLIENTS)
    data = fb.federate(digits.rows, parts, test=0.2)
    for name in ("softmax", "mlp"):
        model = fb.models.build(name, (8, 8, 1), digits.outputs)
        loss = fb.losses.cross_entropy(model.apply)
        for steps, rows in ((1, None), (5, None), (5, 20)):
            work = fb.Work(0.1, steps=steps, batch_size=rows)
            pair = [
                blocks_of(fb.fedavg(one, work), model, data)
                for one in (loss, ProtectRows().hide(loss))
            ]
            compare(f"rows, {name}, {steps} steps of {rows or 'all'} rows", *pair)
        work = fb.Work(0.1, steps=1, batch_size=32)
        pair = [
            blocks_of(
                fb.transforms.dp_fedavg(
                    fb.fedavg(loss, work),
                    clip=0.5,
                    noise=1.0,
                    cohort=CLIENTS,
                    noise_from=source,
                ),
                model,
                data,
            )
            for source in ("seed", "system")
        ]
        compare(f"sum, {name}, of the system over that of a seed", *pair)


if __name__ == "__main__":
    main()

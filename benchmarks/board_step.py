# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of one local step of the board's network, on one device.

20 clients, batches of 10, one epoch a round, as the board's Fashion-MNIST task; images
are random. One setting differs from the first line at a time: the precision, the number
of replicas (seeds x rates), the algorithm, and whether clients are uneven (the longest
has 2.5 times the mean, as under a Dirichlet partition). A line is printed as soon as it
is measured: ``ms_per_step`` of all clients and replicas together,
``us_per_client_step``, seconds to compile, and the seconds that 2,000 rounds would
take. Stops after ``--seconds``.

    PYTHONPATH=src:reproductions/src python benchmarks/board_step.py --seconds 240
"""

import argparse
import json
import time
from typing import NamedTuple

import jax
import numpy as np

import fedblend as fb
from fedblend_reproductions.board.network import Precision, network

RATE, BATCH, ROUNDS, STEPS = 0.005, 10, 2000, 262


class Case(NamedTuple):
    """What is timed."""

    algorithm: str = "fedavg"
    precision: Precision = "tf32"
    replicas: int = 3
    uneven: bool = False
    chunk: int | None = None


CASES = (
    Case(),
    Case(precision="bfloat16"),
    Case(replicas=9),
    Case(algorithm="apfl"),
    Case(precision="float32"),
    Case(replicas=1),
    Case(uneven=True, replicas=9),
    Case(uneven=True, replicas=9, chunk=5),
    Case(replicas=9, precision="bfloat16"),
    Case(algorithm="apfl", precision="bfloat16", replicas=9),
)
"""In order of importance."""


def problem(clients: int, rows: int, uneven: bool) -> fb.FederatedData:
    """Random images; uneven clients have as many rows in all."""
    counts = np.full(clients, rows)
    if uneven:
        parts = np.linspace(2.5, 0.05, clients) ** 1.4
        counts = np.maximum(parts / parts.sum() * rows * clients, BATCH).astype(int)
    draws = np.random.default_rng(0)
    images = draws.random((counts.sum(), 28, 28), np.float32)
    labels = draws.integers(0, 10, counts.sum()).astype(np.int32)
    edges = np.cumsum(counts)[:-1]
    return fb.federate((images, labels), np.split(np.arange(counts.sum()), edges))


def measure(case: Case, clients: int, rows: int, blocks: int) -> dict:
    """The least time of a round, over some rounds after the first."""
    model = network(case.precision)
    loss = fb.losses.cross_entropy(model.apply)
    data = problem(clients, rows, case.uneven)

    def build(rate):
        work = fb.Work(rate, fb.Epochs(1), BATCH)
        if case.algorithm == "apfl":
            return fb.apfl(loss, work, alpha=0.5)
        return fb.fedavg(loss, work)

    run = fb.simulate(
        build,
        model.init,
        data,
        jax.random.split(jax.random.key(0), case.replicas),
        rounds=blocks + 1,
        every=1,
        chunk=case.chunk,
        over=np.full(case.replicas, RATE, np.float32),
    )
    seconds = [record[0].seconds for record in run]
    steps = -(-data.train.capacity // BATCH)  # of the longest client
    least = min(seconds[2:])  # after enrollment and a first round
    return {
        **case._asdict(),
        "ms_per_step": round(1e3 * least / steps, 4),
        "us_per_client_step": round(1e6 * least / (steps * clients * case.replicas), 3),
        "compile_s": round(run.compile_seconds, 1),
        "s_for_2000_rounds": round(
            least * ROUNDS * STEPS * clients * BATCH / data.train.total, 1
        ),
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rows", type=int, default=520)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument(
        "--cases", help="numbers of cases, such as 0,2,5; all if left out"
    )
    given = parser.parse_args()
    begun = time.perf_counter()
    chosen = range(len(CASES)) if given.cases is None else given.cases.split(",")
    for number in map(int, chosen):
        if time.perf_counter() - begun > given.seconds:
            break
        found = measure(CASES[number], given.clients, given.rows, given.blocks)
        print(json.dumps({"case": number, **found}), flush=True)


if __name__ == "__main__":
    main()

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a sweep costs: ten alphas with five seeds as one program, and ten single runs.

Both write whole run folders with training alone, and compile everything anew. A single
run has one seed. They take turns in one process: a few single runs before the sweep and
as many after it; the ratio is the sweep to ten of them.

``python sweep_cost.py [--rounds 50] [--clients 20] [--model softmax] [--turns 2]``
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax

from fedblend.config.config import Config, check
from fedblend.runs.compare import sweep
from fedblend.runs.run import run_config

ALPHAS = [round(0.1 * place, 1) for place in range(1, 11)]
SEEDS = 5


class Seconds(NamedTuple):
    """Of a piece of work: on the clock, and of all cores."""

    wall: float
    cpu: float


def config(options: argparse.Namespace, alpha: float) -> Config:
    """APFL with a fixed alpha on digits, three classes a client."""
    return check(
        {
            "version": 1,
            "name": "sweep cost",
            "data": {
                "source": "digits",
                "partition": "classes_per_client",
                "clients": options.clients,
                "classes": 3,
                "test": 0.25,
            },
            "model": {"name": options.model},
            "algorithm": {
                "name": "apfl",
                "alpha": alpha,
                "learn": "fixed",
                "rate": 0.1,
                "steps": 10,
                "batch_size": 10,
            },
            "run": {"rounds": options.rounds},
        },
        "sweep_cost",
    )


def timed(work) -> Seconds:
    """The time of a piece of work that compiles everything it needs."""
    jax.clear_caches()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def main() -> None:
    """Print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="softmax")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def single(number: int) -> Seconds:
            own = config(options, ALPHAS[number % len(ALPHAS)])
            return timed(lambda: run_config(own, place / f"single{number}"))

        single(99)  # imports, and the first figure of a process
        singles = [single(number) for number in range(options.turns)]
        whole = timed(
            lambda: sweep(
                config(options, 0.5),
                {"algorithm.alpha": ALPHAS},
                place / "sweep",
                seeds=SEEDS,
            )
        )
        more = range(options.turns, 2 * options.turns)
        singles += [single(number) for number in more]
    for kind in Seconds._fields:
        one = sum(getattr(of, kind) for of in singles) / len(singles)
        swept = getattr(whole, kind)
        print(
            f"{kind}: sweep {swept:.1f} s, a single run {one:.1f} s, "
            f"sweep / 10 single runs {swept / (10 * one):.2f}, "
            f"sweep / 50 single runs {swept / (50 * one):.2f}"
        )


if __name__ == "__main__":
    main()

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of rounds in the papers' tables: what docs/reproduce.md estimates from.

    python benchmarks/papers_cpu.py apfl     A6: every method, three seeds side by side
    python benchmarks/papers_cpu.py mixed    M3, M4 and M5: some of their methods

The first block compiles and is left out. An estimate is these times the rounds, rates
and seeds that a table runs; whole tables are not run here.
"""

import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb


def block_seconds(run: Iterator) -> tuple[float, float]:
    """CPU and wall seconds of the third block of a run."""
    for _ in range(2):
        next(run)
    cpu, wall = time.process_time(), time.perf_counter()
    next(run)
    return time.process_time() - cpu, time.perf_counter() - wall


def show(name: str, seconds: tuple[float, float]) -> None:
    print(f"{name}: {seconds[0]:.2f} CPU s, {seconds[1]:.2f} s", flush=True)


def apfl() -> None:
    """A round of each method of A6, then a measurement of all clients."""
    from fedblend_reproductions.apfl import personal_methods

    task, seeds = personal_methods.task(False, personal_methods.random_pairs), 3
    for method in personal_methods.METHODS:
        run = fb.simulate(
            lambda rate, method=method: method.build(task, rate),
            task.model.init,
            task.federated_data,
            jax.vmap(jax.random.key)(jnp.arange(1, seeds + 1)),
            rounds=100,
            every=1,
            measure={"accuracy": fb.metrics.accuracy(task.model.apply)},
            over=jnp.asarray([method.rates(task)[2]] * seeds, jnp.float32),
        )
        show(f"A6 {method.name}, a round and a measurement", block_seconds(iter(run)))


def mixed() -> None:
    """Blocks of some methods of M5, M3 and M4, with a measurement each."""
    from fedblend_reproductions.mixed import faces, movie_runs, movies, text
    from fedblend_reproductions.mixed.task import ALGORITHMS, mixed_fl, simulated

    movie_task = movies.task(False)
    users = np.flatnonzero(movie_task.federated_data.splits["test"].counts).tolist()
    methods = movie_runs.methods(movie_task, movie_runs.SETTINGS["plain"], ALGORITHMS)
    smiles, characters = faces.task(False), text.task(text.FULL)
    cases = [
        *(
            (f"M5 {name}", movie_task, methods[name], (1.0, 0.003), replicas, 3, users)
            for name, replicas in (("baseline", 9), ("one_way", 1), ("two_way", 5))
        ),
        *(
            (f"M3 {how}", smiles, mixed_fl(smiles, how), 0.005, 10, 30, [0])
            for how in ("parallel", "one_way")
        ),
        ("M4 parallel", characters, mixed_fl(characters, "parallel"), 0.5, 5, 15, [0]),
    ]
    for name, task, method, setting, replicas, every, measured in cases:
        run = simulated(
            task,
            method,
            [setting] * replicas,
            range(replicas),
            rounds=100 * every,
            every=every,
            splits=("test",),
            measure=task.measures,
            measure_on=measured,
        )
        what = f"{name}, {replicas} replicas, {every} rounds and a measurement"
        show(what, block_seconds(iter(run)))


if __name__ == "__main__":
    {"apfl": apfl, "mixed": mixed}[sys.argv[1]]()

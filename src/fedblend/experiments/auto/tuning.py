# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tuning a method: all points of its grid on all splits, as one compiled sweep.

Validation rows decide on the point and on the number of rounds: the mean over clients
and splits after every tenth of the planned rounds. Where the last look is the best,
training goes on, up to three times the planned rounds; the same for every method.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.core import Algorithm
from fedblend.experiments.auto.candidates import LOOKS, Candidate, Point, at, grid
from fedblend.experiments.tune import rebuilt
from fedblend.simulation import train_alone
from fedblend.simulation.result import Budget
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import RunSpec, set_up

LONGEST = 3
"""How many times the planned rounds a method may train."""


class Tuned(NamedTuple):
    """What validation rows chose for a method."""

    point: Point
    rounds: int
    score: float
    """The criterion there: the mean over clients and splits."""
    tried: int
    """Rounds that were tried."""
    seconds: float

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "point": self.point._asdict()}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Tuned":
        """From JSON."""
        return cls(**{**plain, "point": Point(**plain["point"])})


def tune(
    config: Config,
    candidate: Candidate,
    built: Built,
    *,
    size: int,
    rounds: int,
    metric: str,
    on_block: Callable[[], bool],
) -> Tuned:
    """Try all points of a candidate's grid, and take the best.

    Args:
        config: the candidate's configuration, at any point.
        candidate: the method.
        built: the data, with a split for every seed.
        size: points of the grid.
        rounds: that are planned.
        metric: what is measured on validation rows; less is better.
        on_block: called after every block; False forbids further rounds.
    """
    begun = time.perf_counter()
    points = grid(candidate, size)
    seeds = len(built.federations)
    run = set_up(_swept(config, candidate, built, points, rounds, metric))
    going = on_block()
    while run.round < run.rounds:
        for _ in run:
            going = on_block()
        score, place, best = _best(run, points, seeds, metric)
        if best == run.round and run.round < LONGEST * rounds and going:
            run.rounds += rounds
    seconds = time.perf_counter() - begun
    return Tuned(points[place], best, score, run.round, round(seconds, 2))


def trained_alone(config: Config, built: Built, tuned: Tuned, metric: str) -> Run:
    """Every client trained alone, as tuned: what all methods are compared with."""
    spec = dataclasses.replace(
        built.spec,
        algorithm=rebuilt(config, built),
        rounds=tuned.rounds,
        every=tuned.rounds,
        splits=config.measure.splits,
    )
    run = set_up(spec)
    rows = train_alone.ROWS[True]
    run.budget = Budget(tuned.rounds, rows, metric, tuned.tried)
    return run.complete()


def _swept(
    config: Config,
    candidate: Candidate,
    built: Built,
    points: list[Point],
    rounds: int,
    metric: str,
) -> RunSpec:
    """A sweep over all points, each on all splits."""
    seeds = len(built.federations)
    every = [(point, seed) for point in points for seed in range(seeds)]
    keys = jnp.atleast_1d(built.key)

    def algorithm(point: Any) -> Algorithm:
        return rebuilt(at(config, candidate, point), built)

    return dataclasses.replace(
        built.spec,
        algorithm=algorithm,
        federated_data=[built.federations[seed] for _, seed in every],
        key=jnp.stack([keys[seed] for _, seed in every]),
        over={
            "rate": jnp.asarray([point.rate for point, _ in every], float),
            "value": jnp.asarray([point.value or 0.0 for point, _ in every], float),
        },
        rounds=rounds,
        every=max(rounds // LOOKS, 1),
        measure={metric: built.measures[metric]},
        splits=["validation"],
    )


def _best(
    run: Run, points: list[Point], seeds: int, metric: str
) -> tuple[float, int, int]:
    """The best score, the place of its point, and after how many rounds.

    A setting at which the model of any client is not finite is out: the mean over the
    other clients would not show it.
    """
    found = (math.inf, 0, run.records[1][0].round)
    spreads = [
        [one.measures["validation"]["personal"][metric] for one in block]
        for block in run.records
    ]
    clients = max(of.clients for of in spreads[0])
    for block, looks in zip(run.records[1:], spreads[1:], strict=True):
        values = [of.mean if of.clients == clients else math.inf for of in looks]
        scores = np.reshape(values, (len(points), seeds)).mean(axis=1)
        scores = np.where(np.isfinite(scores), scores, np.inf)
        place = int(scores.argmin())
        if scores[place] < found[0]:
            found = (float(scores[place]), place, block[0].round)
    return found

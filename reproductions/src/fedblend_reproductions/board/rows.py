# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the cells of one method say under both protocols."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import NamedTuple

import numpy as np

from fedblend_reproductions.board import protocol
from fedblend_reproductions.board.cells import TUNING_SEED, Cell
from fedblend_reproductions.board.methods import Method
from fedblend_reproductions.board.tasks import Task


class Row(NamedTuple):
    """A method on a task with some number of rounds.

    Attributes:
        theirs: accuracy by seed, with the published rate and the best round on test
            rows.
        honest: right rows of each client by seed.
        on_test: accuracy by seed, with rate and round chosen on the reported rows.
        rows: of each client.
        rates: that the honest protocol chose.
        seconds: of all reported runs.
    """

    theirs: dict[int, float]
    honest: dict[int, np.ndarray]
    on_test: dict[int, float]
    rows: np.ndarray
    rates: set[float]
    seconds: float

    @property
    def accuracies(self) -> dict[int, float]:
        """The honest accuracy by seed."""
        return {
            seed: float(right.sum() / self.rows.sum())
            for seed, right in self.honest.items()
        }

    @property
    def worth(self) -> float | None:
        """What choosing on test rows is worth, mean over seeds."""
        own = self.accuracies
        gains = [self.on_test[seed] - own[seed] for seed in own if seed in self.on_test]
        return mean(gains) if gains else None

    def minus(self, other: "Row | None") -> protocol.Difference | None:
        """The paired difference of honest numbers, on the common seeds."""
        if other is None or not np.array_equal(self.rows, other.rows):
            return None
        seeds = sorted(self.honest.keys() & other.honest.keys())
        if not seeds:
            return None
        ours, theirs = (
            np.stack([row.honest[seed] for seed in seeds]) for row in (self, other)
        )
        return protocol.difference(ours, theirs, self.rows)


def row_of(
    task: Task, method: Method, rounds: int, cells: Sequence[Cell], patience: int = 0
) -> Row | None:
    """The row of runs of this length, or None where none was reported."""
    own = [
        cell
        for cell in cells
        if cell["settings"]["task"] == task.name
        and cell["settings"]["method"] == method.name
        and cell["settings"].get("patience", 0) == patience
    ]
    runs: dict[int, dict[float, Cell]] = {}
    tuning: dict[float, Cell] = {}
    for cell in own:
        rate, seed = cell["settings"]["rate"], cell["settings"]["seed"]
        if seed == TUNING_SEED:
            if cell["settings"]["rounds"] == task.tuning_rounds(rounds):
                tuning[rate] = cell
        elif cell["settings"]["rounds"] == rounds:
            runs.setdefault(seed, {})[rate] = cell
    if not runs:
        return None
    rows = np.array(next(iter(next(iter(runs.values())).values()))["rows"]).sum(axis=0)
    rates = _rates(task, tuning)
    honest, on_test, theirs = {}, {}, {}
    for seed, by_rate in sorted(runs.items()):
        chosen = {rate: cell["chosen"] for rate, cell in by_rate.items()}
        if task.rates[0] in chosen:
            score = chosen[task.rates[0]]["all"]["score"]
            theirs[seed] = score / rows.sum()
        if {rates.get("validation"), rates.get("test")} <= chosen.keys():
            honest[seed] = protocol.honest(rates, chosen)
        if rates.get("all") in chosen:
            on_test[seed] = chosen[rates["all"]]["all"]["score"] / rows.sum()
    seconds = sum(cell["seconds"] for some in runs.values() for cell in some.values())
    picked = {rates[name] for name in ("validation", "test") if name in rates}
    return Row(theirs, honest, on_test, rows, picked, seconds)


def _rates(task: Task, tuning: Mapping[float, Cell]) -> dict[str, float]:
    """The rates chosen, or none where some were not tried."""
    if not all(rate in tuning for rate in task.rates):
        return {}
    found = {rate: tuning[rate]["chosen"] for rate in task.rates}
    return protocol.chosen_rates(found)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Early stopping on text: methods run until validation accuracy stops rising.

A method runs in blocks of rounds, all seeds side by side. After each block accuracy is
measured on validation rows of both sides, in the mixture's weights. What is reported of
a seed is its accuracy on test rows where its own validation rows had the best.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedblend_reproductions.cache import Cache
from fedblend_reproductions.mixed import text
from fedblend_reproductions.mixed.task import Curves, Method, Task, curves_of, simulated

RISE, WAIT = 0.001, 8
"""A run ends when so many measurements in a row, in the mean over seeds, have no more
accuracy than the best before them and this rise."""
RULE = (
    f"until {WAIT} measurements in a row have no more accuracy on validation rows of "
    f"both sides, in the mean over seeds, than the best before them and "
    f"{100 * RISE:g} point"
)


class Ended(NamedTuple):
    """Curves on test rows, and accuracy on validation rows ``[seeds, points]``.

    ``stopped`` is False where rounds ran out before accuracy stood still.
    """

    curves: Curves
    validation: np.ndarray
    stopped: bool

    def at_best(self, metric: str) -> np.ndarray:
        """By seed, on test rows where validation rows are best."""
        best = self.validation.argmax(axis=1)[:, None]
        return np.take_along_axis(self.curves.values[metric], best, axis=1)[:, 0]


def settled(validation: np.ndarray) -> bool:
    """Whether accuracies ``[seeds, points]`` have stopped rising."""
    means = validation.mean(axis=0)
    if len(means) <= WAIT:
        return False
    return bool(means[-WAIT:].max() <= means[:-WAIT].max() + RISE)


def trained(
    task: Task,
    method: Method,
    rate: float,
    seeds: Sequence[int],
    *,
    rounds: int,
    every: int,
) -> Ended:
    """A method at a rate, until it is settled or the rounds are over."""
    run = simulated(
        task,
        method,
        [rate] * len(seeds),
        seeds,
        rounds=rounds,
        every=every,
        measure=task.measures,
        measure_on=[0],
        splits=("test", "validation"),
    )
    validation = np.zeros((len(seeds), 0))
    for _ in run:
        values = curves_of(run, task, "validation").values
        # A seed that diverged is as bad as can be.
        validation = np.nan_to_num(text.measured_on("both", values, "accuracy"))
        if settled(validation):
            break
    return Ended(curves_of(run, task), validation, settled(validation))


def known(cache: Cache, name: str, compute: Callable[[], Ended]) -> Ended:
    """The result of a method from the cache, or computed now."""

    def answer():
        found = compute()
        return {**found.curves._asdict(), **found._asdict(), "curves": None}

    plain = cache(name, answer)
    values = {metric: np.array(v, float) for metric, v in plain["values"].items()}
    curves = Curves(np.array(plain["rounds"]), values)
    return Ended(curves, np.array(plain["validation"], float), plain["stopped"])

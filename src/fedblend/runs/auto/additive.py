# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The additive model with own intercepts: linear in numbers and in their bins.

It is ``models.additive``, found as every linear model is. Its optimum is exact, where a
network of a few hundred rows still depends on its first weights.
"""

from collections.abc import Callable

import numpy as np

from fedblend.data.dataset import Task
from fedblend.models.tabular import bin_entries
from fedblend.runs.auto.candidates import Candidate
from fedblend.runs.auto.linear import PooledRows
from fedblend.runs.auto.tuning import Predictions, Split, Table, evaluate_linear

BINS = (8, 4)
"""Of a number: as many as the size of the model allows."""
MOST_ENTRIES = 600
"""Coefficients of a model; Newton's method solves systems of so many equations."""
SPLITS, INPUTS = 5, 100_000
"""Splits that are predicted where the inputs of a split are more than so many."""


def count_bins(task: Task) -> int:
    """The bins of a number; 0 where no number has bins, or too many have."""
    plain = 1 + int(np.prod(task.shape))

    def fits(bins: int) -> bool:
        return task.outputs * (plain + bins * task.ranks) <= MOST_ENTRIES

    return next(filter(fits, BINS), 0) if task.ranks else 0


def add_bins(rows: PooledRows, bins: int) -> PooledRows:
    """Rows with the entries of their numbers' bins as inputs."""
    inputs = np.hstack([rows.inputs, bin_entries(rows.ranks, bins)])
    return PooledRows(inputs, rows.targets, rows.counts)


def evaluate_additive(
    table: Table, candidate: Candidate, left: Callable[[], float]
) -> Predictions | None:
    """Tune the additive model, and predict with it; None without time for it.

    Args:
        table: what is predicted; a setting that is known stays.
        candidate: the method.
        left: the seconds that are left for it; raises if the user asked to stop.
    """
    if left() <= 0:
        return None
    bins = count_bins(table.task)

    first = add_bins(table.to_choose[0].train, bins).inputs
    splits = SPLITS if table.slow or first.size > INPUTS else len(table.to_choose)
    few = [
        [Split(add_bins(one.train, bins), add_bins(one.held, bins)) for one in of]
        for of in (table.to_choose[:splits], table.to_test[:splits])
    ]
    known = table.settings.get(candidate.name)
    settings = dict(table.settings)
    if known is not None:
        settings[candidate.name] = {k: v for k, v in known.items() if k != "bins"}
    more = table._replace(
        to_choose=few[0], to_test=few[1], to_tune=(), settings=settings
    )
    found = evaluate_linear(more, candidate, left)
    return found._replace(setting={**found.setting, "bins": bins})

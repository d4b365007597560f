# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The splits of a comparison by letters: folds of each client's rows.

Each of K folds is held out once for testing, the next one for validation. For squared
errors a client sends one letter, the sums of its folds (``selection.one_letter``), and
every method, setting and error follows from sums over folds. For classes settings are
chosen as if losses were quadratic, by the letters at one mixed model; the scores of the
methods are exact, with letters of their own for each step of Newton's method.
"""

from collections.abc import Sequence

import numpy as np

from fedblend.config.build import Built
from fedblend.data.dataset import Task
from fedblend.data.federated import FederatedData, gather
from fedblend.runs.auto.linear import (
    PooledRows,
    expand,
    hierarchical_models,
    read_rows,
)
from fedblend.runs.auto.tuning import AnySplit, Split, Table, scale_rows
from fedblend.selection.one_letter import Letters, check_rows

FOLDS = 5
LEVEL, SLOPES = 0.1, 0.01
"""The variances of the mixed model at which losses are expanded."""
ADVICE = (
    "take fewer columns (--drop), leave such clients out, or compare without --once"
)


def count_entries(task: Task) -> int:
    """The coefficients of a linear model."""
    return task.outputs * (1 + int(np.prod(task.shape)))


def divide(built: Built) -> tuple[Built, Built]:
    """The rows of all splits as folds: without and with validation rows to train on."""
    data = built.federated_data
    inputs, targets, owner = read_rows(data.splits.values())
    # ``federate`` has shuffled the rows of each client.
    own = [np.flatnonzero(owner == client) for client in range(data.clients)]
    least = np.array([len(index) // FOLDS for index in own])
    check_rows("--once", least, 1 + inputs.shape[1], data.name, ADVICE)

    def some(*folds: int):
        places = [[index[fold::FOLDS] for fold in folds] for index in own]
        return gather((inputs, targets), map(np.concatenate, places))

    chosen, tested = [], []
    for fold in range(FOLDS):
        test, validation, *train = ((fold + step) % FOLDS for step in range(FOLDS))
        parts = some(*train), some(validation), some(test)
        chosen.append(FederatedData(*parts, names=data.names))
        rest = some(validation, *train)
        tested.append(FederatedData(rest, None, parts[2], names=data.names))
    whole = FederatedData(some(*range(FOLDS)), names=data.names)
    built = built._replace(federated_data=whole)
    return built._replace(federations=chosen), built._replace(federations=tested)


def read_letters(table: Table) -> Table:
    """The table with letters: instead of rows for numbers, to choose settings else.

    Args:
        table: whose splits are the folds of ``divide``.
    """
    task = table.task
    rows = scale_rows(task, table.chosen.federated_data.train)
    models = _mixed_models(task, rows)
    folds = [expand(task.kind, split.held, models) for split in table.to_test]
    letters = Letters(*(np.concatenate(of, axis=1) for of in zip(*folds, strict=True)))
    to_choose, to_test = [], []
    for fold in range(FOLDS):
        after = (fold + 1) % FOLDS
        to_choose.append(Split(letters.without(fold, after), letters.only(after)))
        to_test.append(Split(letters.without(fold), letters.only(fold)))
    if task.kind == "regression":
        return table._replace(to_choose=to_choose, to_test=to_test)
    wrote = [rows, *(split.train for split in [*table.to_choose, *table.to_test])]
    return table._replace(to_tune=to_choose, wrote=wrote)


def expand_splits(task: Task, splits: Sequence[AnySplit]) -> list[Split]:
    """Splits as letters at one mixed model, which choose settings of large tables."""
    found = []
    for split in splits:
        rows = split.train
        models = _mixed_models(task, rows)
        both = (expand(task.kind, of, models) for of in (rows, split.held))
        found.append(Split(*both))
    return found


def _mixed_models(task: Task, rows: PooledRows) -> np.ndarray:
    """Where losses are expanded; those of numbers are the same anywhere."""
    if task.kind == "regression":
        return np.zeros((len(rows.counts), count_entries(task)))
    return hierarchical_models(
        task.kind, rows, task.outputs, level=LEVEL, slopes=SLOPES
    )


def count_numbers(table: Table) -> int:
    """The numbers in all letters that a client has written."""
    size = count_entries(table.task)
    letters = FOLDS + sum(rows.letters for rows in table.wrote)
    return letters * (size * (size + 3) // 2 + 1)

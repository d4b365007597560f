# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of a table with times, and a column that says where an event was seen."""

from collections.abc import Callable

import numpy as np

from fedblend.data.dataset import DataError, Dataset
from fedblend.data.readers.read import read
from fedblend.data.readers.tables import RawTable, check_names, read_table
from fedblend.data.readers.targets import labels_of
from fedblend.runs.auto.candidates import Request
from fedblend.stats.survival import read_targets, write_targets

LEAST_EVENTS = 10
"""Of a comparison."""


def read_survival(request: Request) -> Dataset:
    """The rows of a table whose targets are those of ``stats.survival``."""
    table, event = read_table(request.table), str(request.event)
    check_names([request.target, event], [*table.columns], "column", table.where)
    allowed = "1 (the event was seen) or 0 (censored)"
    seen = _numbers(table, event, lambda of: np.isin(of, (0, 1)), allowed)
    allowed = "a time, a number of 0 or more"
    times = _numbers(table, request.target, lambda of: of >= 0, allowed)
    if (seen == 1).sum() < LEAST_EVENTS:
        raise DataError(
            f"{table.where}: column {event!r} has {(seen == 1).sum()} events; a "
            f"comparison needs {LEAST_EVENTS} or more"
        )
    columns = {name: of for name, of in table.columns.items() if name != event}
    targets = np.where(np.isnan(seen), np.nan, write_targets(times, seen == 1))
    return read(
        {**columns, request.target: targets},
        target=request.target,
        client=request.client,
        inputs=request.inputs or None,
        drop=[name for name in request.drop if name != event],
        kind="regression",
        preprocess=request.preprocess or "auto",
        time=request.time,
        group=request.group,
    )


def views(dataset: Dataset) -> list[Dataset]:
    """The same rows with times as targets, and with whether the event was seen."""
    inputs, targets = dataset.rows
    times, events = read_targets(targets)
    by_event = dataset._replace(rows=(inputs, events.astype(np.int32)), kind="binary")
    return [dataset._replace(rows=(inputs, times)), by_event]


def _numbers(
    table: RawTable,
    column: str,
    fit: Callable[[np.ndarray], np.ndarray],
    allowed: str,
) -> np.ndarray:
    """The numbers of a column, NaN where it is empty."""
    labels, present = labels_of(table.columns[column])
    fits = labels.dtype.kind in "biuf" and fit(labels)
    for row in np.flatnonzero(present & ~np.asarray(fits))[:1]:
        value = table.columns[column][row]
        raise DataError(
            f"{table.where}: column {column!r} has {value!s:.40} in row {row} (counted "
            f"from 0); it must be {allowed}"
        )
    return np.where(present, labels, np.nan)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A table in words: its rows, clients and classes, and what becomes of each column."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import NUMBERS, Dataset
from fedblend.data.preprocess.preprocessing import describe as describe_columns
from fedblend.data.preprocess.schema import Schema, schema_of
from fedblend.data.readers.read import read
from fedblend.data.readers.tables import FILES, check_names, read_table

SHOWN = 8
"""Classes that are listed."""


class TableDescription(NamedTuple):
    """What a table holds."""

    lines: tuple[str, ...]
    """Rows, clients, targets, inputs: one line each."""
    columns: list[dict[str, Any]]
    """An entry for each column that may be an input; see ``Preprocessing.describe``."""
    notes: tuple[str, ...]
    """Decisions that the reader made."""


def describe(
    source: Any, *, client: str | None = None, target: str | None = None
) -> TableDescription:
    """What a table holds, and what preprocessing makes of it.

    Args:
        source: as of ``fedblend.data.read``.
        client: the column of the client of each row, if any.
        target: the column of the target; without it all columns may be inputs.
    """
    if target is None and Path(str(source)).suffix in FILES:
        table = read_table(source)
        check_names([client] if client else [], [*table.columns], "column", table.where)
        known = {name: table.columns[name] for name in table.others((client,))}
        schema = schema_of(known)
        lines = [f"{table.rows} rows; no target is named", _inputs(schema)]
        return TableDescription(tuple(lines), describe_columns(schema), table.notes)
    names: dict[str, Any] = {"target": target, "client": client}
    dataset = read(source, **names)
    lines = [f"{len(dataset.rows[0])} rows", *_clients(dataset), *_targets(dataset)]
    if dataset.schema is None:
        dataset = read(source, **names, preprocess="always")
        lines.append(
            "these are arrays, by default used as they are; "
            'preprocess = "always" does this:'
        )
    schema = dataset.schema
    assert schema is not None
    lines.append(_inputs(schema))
    return TableDescription(tuple(lines), describe_columns(schema), dataset.notes)


def _inputs(schema: Schema) -> str:
    return f"{len(schema.kept)} columns make {schema.width} inputs"


def _clients(dataset: Dataset) -> list[str]:
    if dataset.keys is None:
        return ["no column names the client of a row"]
    counts = np.unique(dataset.keys, return_counts=True)[1]
    return [
        f"{len(counts)} clients with {counts.min()} to {counts.max()} rows, half of "
        f"them with {int(np.median(counts))} or more"
    ]


def _targets(dataset: Dataset) -> list[str]:
    targets = dataset.rows[1]
    if dataset.kind in NUMBERS:
        low, high = targets.min(), targets.max()
        what = "count" if dataset.kind == "counts" else "number"
        return [f"the target is a {what}, {low:.4g} to {high:.4g}"]
    counts = np.bincount(targets, minlength=len(dataset.label_names))
    order = np.argsort(-counts, kind="stable")[:SHOWN]
    shown = [
        f"{dataset.label_names[one]} {counts[one] / len(targets):.1%}" for one in order
    ]
    more = len(counts) - len(order)
    rest = f" and {more} more" if more else ""
    return [f"the target has {len(counts)} classes: {', '.join(shown)}{rest}"]

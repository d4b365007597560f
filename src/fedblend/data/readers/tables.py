# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Readers of .csv and .parquet tables, with pyarrow."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.data.dataset import DataError, require
from fedblend.data.readers.arrays import Raw, check_names


def read_table(
    path: Path, inputs: Sequence[str] | None, target: str | None, client: str | None
) -> Raw:
    """The rows of a .csv or .parquet file."""
    table = _opened(path)
    names = list(table.column_names)
    if target is None:
        raise DataError(f"{path}: target: name one of the columns {', '.join(names)}")
    notes: tuple[str, ...] = ()
    if inputs is None:
        inputs = _others(table, (target, client))
        left = [n for n in names if n not in (*inputs, target, client)]
        if left:
            notes = (
                f"{path.name}: left out {', '.join(map(repr, left))}, the index of a "
                "pandas table; named in inputs it is one of them",
            )
    chosen = [target, *([client] if client is not None else []), *inputs]
    check_names(chosen, names, "column", path)
    if not inputs or target in inputs:
        raise DataError(
            f"{path}: inputs: need at least one column, other than the target"
        )
    return Raw(
        _stacked(table, inputs, path),
        _values(table.column(target), target, path),
        None if client is None else _values(table.column(client), client, path),
        tuple(inputs),
        notes,
    )


def read_columns(
    path: Path, inputs: Sequence[str] | None, others: Sequence[str]
) -> np.ndarray:
    """The inputs of a file that need not have a target; all columns but ``others``."""
    table = _opened(path)
    chosen = inputs or _others(table, others)
    check_names(chosen, table.column_names, "column", path)
    return _stacked(table, chosen, path)


def input_columns(path: Path, known: Sequence[str | None]) -> list[str]:
    """The columns of a file that are inputs by default: all but these."""
    return _others(_opened(path), known)


def _others(table: Any, known: Sequence[str | None]) -> list[str]:
    """The columns that are inputs by default: all but these and pandas' index."""
    try:
        about = table.schema.pandas_metadata or {}
    except ValueError:  # pandas did not write this file
        about = {}
    index = [name for name in about.get("index_columns", ()) if isinstance(name, str)]
    return [
        name
        for name in table.column_names
        if name not in known
        and name not in index
        and not re.fullmatch(r"__index_level_\d+__", name)
    ]


def _opened(path: Path) -> Any:
    require("pyarrow", path.suffix[1:])
    pyarrow = require("pyarrow.lib", path.suffix[1:])
    try:
        if path.suffix == ".csv":
            table = require("pyarrow.csv", "csv").read_csv(path)
        else:
            table = require("pyarrow.parquet", "parquet").read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read: {reason}") from None
    names = list(table.column_names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: the column {twice[0]!r} occurs more than once")
    return table


def _stacked(table: Any, inputs: Sequence[str], path: Path) -> np.ndarray:
    if table.num_rows == 0:
        raise DataError(f"{path}: there are no rows")
    columns = [_numbers(table.column(name), name, path) for name in inputs]
    return np.stack(columns, axis=1)


def _values(column: Any, name: str, path: Path) -> np.ndarray:
    """A column as numbers or as texts, without missing values."""
    values = column.to_pylist()
    for row, value in enumerate(values):
        if value is None or value == "" or value != value:
            raise DataError(
                f"{path}: column {name!r} is empty in row {row} (counted from 0)"
            )
    if all(isinstance(value, bool | int | float) for value in values):
        return np.array(values)
    return np.array([str(value) for value in values])


def _numbers(column: Any, name: str, path: Path) -> np.ndarray:
    """A column as float32, NaN where a value is missing."""
    stored_as_numbers = ("int", "uint", "float", "double", "halffloat", "bool")
    if str(column.type).startswith(stored_as_numbers):
        values = column.cast("float64", safe=False).to_numpy()
    else:
        values = np.empty(len(column))
        for row, value in enumerate(column.to_pylist()):
            try:
                values[row] = float(value)
            except (TypeError, ValueError):
                raise DataError(
                    f"{path}: column {name!r} is not numeric: row {row} (counted from "
                    f"0) is {value!r:.40}; choose the numeric ones with inputs"
                ) from None
    with np.errstate(over="ignore"):  # too large a number becomes inf, and is reported
        return values.astype(np.float32)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Readers of .npz files with plain arrays, and of .csv and .parquet tables.

Nothing is ever unpickled. pyarrow reads the tables.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import AbsentColumnError, DataError, intact, require


class Raw(NamedTuple):
    """The arrays of a file, before the targets are interpreted."""

    inputs: np.ndarray
    targets: np.ndarray
    keys: np.ndarray | None
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@contextmanager
def opened(path: Path, problem: str) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of an .npz file; any damage raises one line with this problem."""
    with intact(path, problem), path.open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise TypeError("a single array")
        with stored:
            yield stored


def read_npz(path: Path, inputs: str, target: str, client: str | None) -> Raw:
    """The rows of an .npz file; without ``client`` its array "clients", if any."""
    with opened(path, "is damaged, or not an .npz of plain arrays") as stored:
        names = list(stored.files)
        wanted = [inputs, target, *([client] if client is not None else [])]
        check_names(wanted, names, "array", path)
        keys = client or ("clients" if "clients" in names else None)
        wanted += [keys] if keys is not None else []
        arrays = {name: _array(stored, name, path) for name in wanted}
    y = arrays[target]
    if y.ndim not in (1, 2):
        raise DataError(
            f"{path}: {target!r} must be [rows] or [rows, width], not {y.shape}"
        )
    owner = None if keys is None else arrays[keys]
    if owner is not None and owner.ndim != 1:
        raise DataError(f"{path}: {keys!r} must be one key a row, not {owner.shape}")
    return Raw(_inputs(arrays[inputs], inputs, path), y, owner)


def read_inputs_npz(path: Path, inputs: str) -> np.ndarray:
    """The inputs of a file that need not have targets."""
    with opened(path, "is damaged, or not an .npz of plain arrays") as stored:
        check_names([inputs], list(stored.files), "array", path)
        return _inputs(_array(stored, inputs, path), inputs, path)


def check_names(
    wanted: Sequence[str], names: Sequence[str], kind: str, path: Path
) -> None:
    """Refuse the name of a column or array that a file does not have."""
    for name in wanted:
        if name not in names:
            raise AbsentColumnError(
                name,
                f"{path}: there is no {kind} {name!r}; there are "
                f"{', '.join(names) or 'none'}",
            )


def _inputs(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    plain = np.issubdtype(array.dtype, np.number) or array.dtype == bool
    if array.ndim < 2 or not plain:
        raise DataError(
            f"{path}: {name!r} must be numbers of shape [rows, ...], not {array.dtype} "
            f"of shape {array.shape}"
        )
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _array(stored: Any, name: str, path: Path) -> np.ndarray:
    try:
        return stored[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{path}: array {name!r} holds Python objects, which are never loaded; "
            "save numbers or texts"
        ) from None


def read_folder(path: Path, inputs: str, target: str, client: str | None) -> Raw:
    """The rows of all .npz files of a folder; without ``client`` a file is one."""
    files = sorted(path.glob("*.npz"))
    if not files:
        raise DataError(f"{path}: there are no .npz files in this folder")
    parts = []
    for file in files:
        part = read_npz(file, inputs, target, client)
        if client is None:
            part = part._replace(keys=np.full(len(part.inputs), file.stem))
        first = parts[0] if parts else part
        for name, mine, other in (
            (inputs, part.inputs, first.inputs),
            (target, part.targets, first.targets),
        ):
            if mine.shape[1:] != other.shape[1:]:
                raise DataError(
                    f"{file}: rows of {name!r} have shape {mine.shape[1:]}, but those "
                    f"of {files[0].name} have {other.shape[1:]}"
                )
        parts.append(part)
    return Raw(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.keys for part in parts if part.keys is not None]),
    )


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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Your own data: a table (.csv, .parquet), arrays (.npz), or a folder of .npz files.

A table has one column for the target, one for the client of a row, and numbers in the
others. An .npz holds the arrays ``inputs``, ``targets`` and ``clients``. In a folder
every .npz is one client, named like its file, unless client arrays are asked for.
"""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from fedblend.data.dataset import (
    DataError,
    Dataset,
    Kind,
    MissingDataError,
    check,
    require,
)


class _Raw(NamedTuple):
    """What a reader found."""

    inputs: np.ndarray
    targets: np.ndarray
    keys: np.ndarray | None
    columns: tuple[str, ...] = ()


def read(
    path: str | Path,
    *,
    target: str | None = None,
    client: str | None = None,
    inputs: str | Sequence[str] | None = None,
    kind: Kind | None = None,
) -> Dataset:
    """Read your own data, and check it.

    Args:
        path: a .csv, .parquet or .npz file, or a folder of .npz files.
        target: the column (must be given) or array ("targets") of the target.
        client: the column or array ("clients", if there) of the client of each row.
        inputs: the columns (all others by default) or the array ("inputs") of inputs.
        kind: "classes", "binary" or "regression". By default real numbers are
            regression; two different integers or texts are binary, more are classes.
    """
    path = Path(path)
    if kind is not None and kind not in get_args(Kind):
        raise DataError(f"kind: {kind!r} is not one of {', '.join(get_args(Kind))}")
    if not path.exists():
        raise MissingDataError(f"{path}: no such file or folder")
    if path.is_dir() or path.suffix == ".npz":
        if inputs is not None and not isinstance(inputs, str):
            raise DataError(f"{path}: inputs: name one array, not a list")
        reader = _read_folder if path.is_dir() else _read_npz
        raw = reader(path, inputs or "inputs", target or "targets", client)
    elif path.suffix in (".csv", ".parquet"):
        chosen = [inputs] if isinstance(inputs, str) else inputs
        raw = _read_table(path, chosen, target, client)
    else:
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without suffix'}; allowed "
            "are .csv, .parquet, .npz and a folder of .npz files"
        )
    dataset = _with_kind(raw, kind, path)
    check(dataset)
    return dataset


def _with_kind(raw: _Raw, kind: Kind | None, path: Path) -> Dataset:
    """Turn targets into class numbers or float32, by their kind."""
    values = raw.targets
    if len(values) == 0:
        raise DataError(f"{path}: there are no rows")
    real = np.issubdtype(values.dtype, np.floating)
    number = np.issubdtype(values.dtype, np.number) or values.dtype == bool
    if kind == "regression" or (kind is None and real):
        if not number:
            raise DataError(
                f"{path}: regression needs numeric targets, not {values[0]!s:.40}"
            )
        targets = values.astype(np.float32)
        width = 1 if targets.ndim == 1 else targets.shape[1]
        return Dataset(
            (raw.inputs, targets), "regression", width, keys=raw.keys,
            name=path.stem, columns=raw.columns,
        )  # fmt: skip
    if values.ndim != 1:
        raise DataError(
            f"{path}: class targets must be one a row, not of shape {values.shape}"
        )
    if real and not (np.isfinite(values) & (values == np.rint(values))).all():
        raise DataError(f"{path}: the targets are real numbers, not {kind}")
    names, codes = np.unique(values, return_inverse=True)
    if len(names) == 1:
        raise DataError(
            f"{path}: all {len(values)} targets are {names[0]}; at least 2 classes "
            "are needed"
        )
    if kind == "binary" and len(names) != 2:
        raise DataError(f"{path}: binary targets need 2 classes, not {len(names)}")
    kind = kind or ("binary" if len(names) == 2 else "classes")
    return Dataset(
        (raw.inputs, codes.astype(np.int32)),
        kind,
        1 if kind == "binary" else len(names),
        keys=raw.keys,
        name=path.stem,
        label_names=tuple(str(name) for name in names),
        columns=raw.columns,
    )


def _read_table(
    path: Path, inputs: Sequence[str] | None, target: str | None, client: str | None
) -> _Raw:
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
    if target is None:
        raise DataError(f"{path}: target: name one of the columns {', '.join(names)}")
    if inputs is None:
        inputs = [name for name in names if name not in (target, client)]
    for name in (target, *([client] if client is not None else []), *inputs):
        if name not in names:
            raise DataError(
                f"{path}: there is no column {name!r}; there are {', '.join(names)}"
            )
    if not inputs or target in inputs:
        raise DataError(
            f"{path}: inputs: need at least one column, other than the target"
        )
    if table.num_rows == 0:
        raise DataError(f"{path}: there are no rows")
    columns = [_numbers(table.column(name), name, path) for name in inputs]
    return _Raw(
        np.stack(columns, axis=1),
        _values(table.column(target), target, path),
        None if client is None else _values(table.column(client), client, path),
        tuple(inputs),
    )


def _values(column: Any, name: str, path: Path) -> np.ndarray:
    """A column as numbers or as texts; nothing may be missing."""
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
    """A column as float32, NaN where something is missing."""
    for row, value in enumerate(column.to_pylist() if _textual(column) else ()):
        try:
            float(value)
        except (TypeError, ValueError):
            raise DataError(
                f"{path}: column {name!r} is not numeric: row {row} (counted from 0) "
                f"is {value!r:.40}; choose the numeric ones with inputs"
            ) from None
    with np.errstate(over="ignore"):  # what does not fit becomes inf, and is reported
        return column.cast("float64").to_numpy().astype(np.float32)


def _textual(column: Any) -> bool:
    """Whether the values of a column are something else than numbers."""
    kind = str(column.type)
    return not kind.startswith(("int", "uint", "float", "double", "half", "bool"))


def _read_npz(path: Path, inputs: str, target: str, client: str | None) -> _Raw:
    try:
        with np.load(path, allow_pickle=False) as stored:
            names = list(stored.files)
            wanted = [inputs, target, *([client] if client is not None else [])]
            for name in wanted:
                if name not in names:
                    raise DataError(
                        f"{path}: there is no array {name!r}; there are "
                        f"{', '.join(names) or 'none'}"
                    )
            keys = client or ("clients" if "clients" in names else None)
            arrays = {
                name: _array(stored, name, path) for name in {*wanted, keys or inputs}
            }
    except DataError:
        raise
    except (
        ValueError,
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        AttributeError,
    ):
        raise DataError(
            f"{path}: is damaged, or not an .npz of plain numbers and texts"
        ) from None
    x, y = arrays[inputs], arrays[target]
    if x.ndim < 2 or not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise DataError(
            f"{path}: {inputs!r} must be numbers of shape [rows, ...], not {x.dtype} "
            f"of shape {x.shape}"
        )
    if y.ndim not in (1, 2):
        raise DataError(
            f"{path}: {target!r} must be [rows] or [rows, width], not {y.shape}"
        )
    owner = None if keys is None else arrays[keys]
    if owner is not None and owner.ndim != 1:
        raise DataError(f"{path}: {keys!r} must be one key a row, not {owner.shape}")
    with np.errstate(over="ignore"):
        return _Raw(x.astype(np.float32), y, owner)


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


def _read_folder(path: Path, inputs: str, target: str, client: str | None) -> _Raw:
    files = sorted(path.glob("*.npz"))
    if not files:
        raise DataError(f"{path}: there are no .npz files in this folder")
    parts = []
    for file in files:
        part = _read_npz(file, inputs, target, client)
        if client is None:
            part = part._replace(keys=np.full(len(part.inputs), file.stem))
        first = parts[0] if parts else part
        for name, mine, other in (
            (inputs, part.inputs, first.inputs),
            (target, part.targets, first.targets),
        ):
            if mine.shape[1:] != other.shape[1:]:
                raise DataError(
                    f"{file}: {name!r} has rows of shape {mine.shape[1:]}, but those of "
                    f"{files[0].name} have {other.shape[1:]}"
                )
        parts.append(part)
    return _Raw(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.keys for part in parts if part.keys is not None]),
    )

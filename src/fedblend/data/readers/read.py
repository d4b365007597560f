# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Your own data: a table (.csv, .parquet), arrays (.npz), or a folder of .npz files.

A table has one column for the target, one for the client of a row, and numbers in the
others. An .npz file holds the arrays ``inputs``, ``targets`` and ``clients``. In a
folder every .npz file is one client, named like its file, unless ``client`` names an
array.

``read`` reads a dataset. ``read_new_rows`` and ``read_inputs`` read rows for a model
that is trained already: they must have the columns or the shape that the model was
trained on and no class that it does not know, and may all be of one class.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fedblend.data.dataset import (
    DataError,
    Dataset,
    Kind,
    MissingDataError,
    Task,
    check,
    check_rows,
)
from fedblend.data.readers import files
from fedblend.data.readers.files import Raw

TABLES = (".csv", ".parquet")


def read(
    path: str | Path,
    *,
    target: str | None = None,
    client: str | None = None,
    inputs: str | Sequence[str] | None = None,
    kind: Kind | None = None,
) -> Dataset:
    """Read a dataset of your own, and check it.

    Args:
        path: a .csv, .parquet or .npz file, or a folder of .npz files.
        target: the column (must be given) or array ("targets") of the target.
        client: the column or array ("clients", if there) of the client of each row.
        inputs: the columns (all others by default) or the array ("inputs") of inputs.
        kind: "classes", "binary" or "regression". By default real numbers are
            regression, unless they are 0.0 and 1.0 or -1.0 and 1.0; those and two
            different integers or texts are binary, more are classes.
    """
    path = Path(path)
    if kind is not None and kind not in get_args(Kind):
        raise DataError(f"kind: {kind!r} is not one of {', '.join(get_args(Kind))}")
    dataset = _with_kind(read_raw(path, target, client, inputs), kind, path)
    check(dataset)
    return dataset


def read_new_rows(
    path: str | Path,
    task: Task,
    *,
    target: str | None = None,
    client: str | None = None,
    inputs: str | None = None,
) -> Dataset:
    """Read rows for a known task, and check that they fit.

    Args:
        path: a .csv, .parquet or .npz file, or a folder of .npz files.
        task: what the model was trained for.
        target: the column (must be given) or array ("targets") of the target.
        client: the column or array (by default "clients", if there) of the client of
            each row; without it all rows belong to one client.
        inputs: the array ("inputs") of inputs; those of a table are the task's.
    """
    path = Path(path)
    table = path.suffix in TABLES
    chosen = list(task.columns) or None if table else inputs
    raw = read_raw(path, target, client, chosen)
    rows = _shaped(raw.inputs, task, path, flat=table)
    if task.kind == "sequence":
        rows = rows.astype(np.int32)
    if task.numbers:
        rows = _whole(rows, task, path)
    dataset = Dataset(
        (rows, _targets(raw.targets, task, path)),
        task.kind,
        task.outputs,
        keys=raw.keys,
        name=path.stem,
        label_names=task.labels,
        columns=raw.columns,
    )
    check_rows(dataset, dataset.rows, dataset.keys, str(path))
    return dataset


def read_inputs(
    path: str | Path,
    task: Task,
    *,
    inputs: str | None = None,
    others: Sequence[str] = (),
) -> np.ndarray:
    """Read the inputs of rows without targets, to predict.

    Args:
        path: a .csv, .parquet or .npz file.
        task: what the model was trained for.
        inputs: the array ("inputs") of an .npz; those of a table are the task's.
        others: columns of a table that are no inputs, where the task names no columns.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    if path.suffix not in (*TABLES, ".npz"):
        raise DataError(f"{path}: cannot be read; allowed are .csv, .parquet and .npz")
    if path.suffix == ".npz":
        rows = files.read_inputs_npz(path, inputs or "inputs")
    else:
        rows = files.read_columns(path, list(task.columns) or None, others)
    rows = _shaped(rows, task, path, flat=path.suffix != ".npz")
    if not np.isfinite(rows).all():
        row = int(np.flatnonzero(~np.isfinite(rows.reshape(len(rows), -1)).all(1))[0])
        raise DataError(f"{path}: row {row} (counted from 0) is not finite")
    return _whole(rows, task, path) if task.numbers else rows


def read_raw(
    path: Path,
    target: str | None,
    client: str | None,
    inputs: str | Sequence[str] | None,
) -> Raw:
    """The arrays of a file or folder, with the targets as stored."""
    if not path.exists():
        raise MissingDataError(f"{path}: no such file or folder")
    if path.is_dir() or path.suffix == ".npz":
        if inputs is not None and not isinstance(inputs, str):
            raise DataError(f"{path}: inputs: name one array, not a list")
        reader = files.read_folder if path.is_dir() else files.read_npz
        return reader(path, inputs or "inputs", target or "targets", client)
    if path.suffix in TABLES:
        chosen = [inputs] if isinstance(inputs, str) else inputs
        return files.read_table(path, chosen, target, client)
    raise DataError(
        f"{path}: cannot read {path.suffix or 'a file without suffix'}; allowed "
        "are .csv, .parquet, .npz and a folder of .npz files"
    )


def _with_kind(raw: Raw, kind: Kind | None, path: Path) -> Dataset:
    """The dataset with targets as class numbers or float32, by their kind."""
    values = raw.targets
    if len(values) == 0:
        raise DataError(f"{path}: there are no rows")
    real = np.issubdtype(values.dtype, np.floating)
    notes = raw.notes
    # pandas makes real numbers of integers.
    found = np.unique(values).tolist() if values.ndim == 1 else []
    if kind is None and real and found in ([0.0, 1.0], [-1.0, 1.0]):
        kind = "binary"
        notes += (
            f"{path.name}: targets are {' and '.join(map(str, found))} "
            'only, and taken as two classes; kind = "regression" takes them as numbers',
        )
    known: dict[str, Any] = {
        "keys": raw.keys,
        "name": path.stem,
        "columns": raw.columns,
        "notes": notes,
    }
    if kind == "regression" or (kind is None and real):
        if not (np.issubdtype(values.dtype, np.number) or values.dtype == bool):
            raise DataError(
                f"{path}: regression needs numeric targets, not {values[0]!s:.40}"
            )
        targets = values.astype(np.float32)
        width = 1 if targets.ndim == 1 else targets.shape[1]
        return Dataset((raw.inputs, targets), "regression", width, **known)
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
    outputs = 1 if kind == "binary" else len(names)
    rows = (raw.inputs, codes.astype(np.int32))
    return Dataset(rows, kind, outputs, label_names=tuple(map(str, names)), **known)


def _shaped(rows: np.ndarray, task: Task, path: Path, *, flat: bool) -> np.ndarray:
    """Rows in the shape of the task; those of a table may be flat."""
    size = np.prod(task.shape, dtype=int)
    if flat and not task.columns and np.prod(rows.shape[1:], dtype=int) == size:
        rows = rows.reshape(len(rows), *task.shape)
    if rows.shape[1:] != task.shape:
        raise DataError(
            f"{path}: inputs of shape {rows.shape[1:]}, but the model was trained on "
            f"{task.shape}"
        )
    return rows


def _whole(rows: np.ndarray, task: Task, path: Path) -> np.ndarray:
    """Inputs that are class numbers, as integers."""
    known = (rows == np.rint(rows)) & (rows >= 0) & (rows < task.outputs)
    if not known.all():
        place = tuple(np.argwhere(~known)[0])
        raise DataError(
            f"{path}: input {rows[place]:g} in row {place[0]} (counted from 0) is not "
            f"a number in 0..{task.outputs - 1}"
        )
    return rows.astype(np.int32)


def _targets(values: np.ndarray, task: Task, path: Path) -> np.ndarray:
    """Targets as in the task: real numbers, or numbers of its classes."""
    if task.kind in ("classes", "binary"):
        if values.ndim != 1:
            raise DataError(
                f"{path}: class targets must be one a row, not of shape {values.shape}"
            )
        return _class_numbers(values, task, path)
    if not np.issubdtype(values.dtype, np.number):
        raise DataError(f"{path}: targets must be numbers, not {values[0]!s:.40}")
    if task.kind != "regression":
        return values.astype(np.int32)
    width = 1 if values.ndim == 1 else values.shape[1]
    if width != task.outputs:
        raise DataError(
            f"{path}: {width} targets a row, but the model was trained on "
            f"{task.outputs}"
        )
    return values.astype(np.float32)


def _class_numbers(values: np.ndarray, task: Task, path: Path) -> np.ndarray:
    """The class number of every row; without class names, targets are the numbers."""
    count = 2 if task.kind == "binary" else task.outputs
    names = task.labels or tuple(str(number) for number in range(count))
    # One file has 1 where another has 1.0: compare numbers by value.
    numeric = np.issubdtype(values.dtype, np.number)
    known = {_number(name) if numeric else name: n for n, name in enumerate(names)}
    found, which = np.unique(values, return_inverse=True)
    codes = [known.get(float(v) if numeric else str(v), -1) for v in found]
    if -1 in codes:
        allowed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise DataError(
            f"{path}: target {found[codes.index(-1)]!s:.40} is no class that the model "
            f"was trained on; these are {allowed}"
        )
    return np.array(codes, np.int32)[which]


def _number(name: str) -> float | str:
    try:
        return float(name)
    except ValueError:
        return name

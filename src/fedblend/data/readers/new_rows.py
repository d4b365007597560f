# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Further rows of a task that is known: what newcomers bring to a trained model.

The rows must be like those that the model was trained on: the same columns or shape,
and no class that it does not know. Unlike a dataset of its own they may be of one class
only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedblend.data.dataset import DataError, Dataset, Kind, MissingDataError, check_rows
from fedblend.data.readers.arrays import read_inputs_npz
from fedblend.data.readers.read import read_raw
from fedblend.data.readers.tables import read_columns


class Task(NamedTuple):
    """What a model is for: what rows look like, and what their targets mean."""

    kind: Kind
    outputs: int
    """Scores a model gives."""
    shape: tuple[int, ...]
    """The shape of one row's inputs."""
    labels: tuple[str, ...] = ()
    """The names of the classes, by number."""
    columns: tuple[str, ...] = ()
    """The names of the inputs, where they came as a table."""
    numbers: bool = False
    """Whether inputs are numbers of classes, such as movies, instead of quantities."""


def task_of(dataset: Dataset) -> Task:
    """The task that a dataset is of."""
    return Task(
        dataset.kind,
        dataset.outputs,
        dataset.rows[0].shape[1:],
        dataset.label_names,
        dataset.columns,
    )


def read_further(
    path: str | Path,
    task: Task,
    *,
    target: str | None = None,
    client: str | None = None,
    inputs: str | None = None,
) -> Dataset:
    """Read rows of a known task, and check that they are.

    Args:
        path: a .csv, .parquet or .npz file, or a folder of .npz files.
        task: what the rows have to be like.
        target: the column (must be given) or array ("targets") of the target.
        client: the column or array ("clients", if there) of the client of each row;
            all rows are one client's where there is none.
        inputs: the array ("inputs") of inputs; those of a table are the task's.
    """
    path = Path(path)
    table = path.suffix in (".csv", ".parquet")
    raw = read_raw(
        path, target, client, list(task.columns) or None if table else inputs
    )
    rows = _shaped(raw.inputs, task, path, flat=table)
    if task.kind == "sequence":
        rows = rows.astype(np.int32)
    if task.numbers:
        rows = _whole(rows, task, path)
    further = Dataset(
        (rows, _targets(raw.targets, task, path)),
        task.kind,
        task.outputs,
        keys=raw.keys,
        name=path.stem,
        label_names=task.labels,
        columns=raw.columns,
    )
    check_rows(further, further.rows, further.keys, str(path))
    return further


def read_inputs(
    path: str | Path,
    task: Task,
    *,
    inputs: str | None = None,
    others: Sequence[str] = (),
) -> np.ndarray:
    """Read the inputs of rows whose targets nobody knows, or needs.

    Args:
        path: a .csv, .parquet or .npz file.
        task: what the rows have to be like.
        inputs: the array ("inputs") of an .npz; those of a table are the task's.
        others: columns of a table that are no inputs, if the task names none.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    if path.suffix not in (".csv", ".parquet", ".npz"):
        raise DataError(f"{path}: cannot be read; allowed are .csv, .parquet and .npz")
    if path.suffix == ".npz":
        rows = read_inputs_npz(path, inputs or "inputs")
    else:
        rows = read_columns(path, list(task.columns) or None, others)
    rows = _shaped(rows, task, path, flat=path.suffix != ".npz")
    if not np.isfinite(rows).all():
        row = int(np.flatnonzero(~np.isfinite(rows.reshape(len(rows), -1)).all(1))[0])
        raise DataError(f"{path}: row {row} (counted from 0) is not finite")
    return _whole(rows, task, path) if task.numbers else rows


def _shaped(rows: np.ndarray, task: Task, path: Path, *, flat: bool) -> np.ndarray:
    """Rows of the shape of the task; those of a table may be flat."""
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
    """Inputs that are numbers of classes, as integers."""
    known = (rows == np.rint(rows)) & (rows >= 0) & (rows < task.outputs)
    if not known.all():
        place = tuple(np.argwhere(~known)[0])
        raise DataError(
            f"{path}: input {rows[place]:g} in row {place[0]} (counted from 0) is not "
            f"a number in 0..{task.outputs - 1}"
        )
    return rows.astype(np.int32)


def _targets(values: np.ndarray, task: Task, path: Path) -> np.ndarray:
    """Targets as the task has them: real numbers, or numbers of its classes."""
    if task.kind in ("classes", "binary"):
        if values.ndim != 1:
            raise DataError(
                f"{path}: class targets must be one a row, not of shape {values.shape}"
            )
        return _numbers(values, task, path)
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


def _numbers(values: np.ndarray, task: Task, path: Path) -> np.ndarray:
    """The number of every row's class; without names they are the numbers."""
    count = 2 if task.kind == "binary" else task.outputs
    names = task.labels or tuple(str(number) for number in range(count))
    # A file has 1 where another has 1.0: numbers are compared as such.
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

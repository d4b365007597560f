# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Predictions for the rows of a raw table, by one model or by that of each client.

Preprocessing is part of the models. TablePredictions are names of classes, numbers of
classes without names, or real numbers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import NUMBERS, DataError
from fedblend.data.readers.read import read_inputs
from fedblend.data.readers.tables import FILES, RawTable, read_table
from fedblend.data.readers.targets import labels_of
from fedblend.errors import RunError, hint
from fedblend.extras import require
from fedblend.runs.export.portable import Portable, read_portable

NO_SHARED = ", so there is no shared model; name a client, whose own model predicts"
"""The end of a line."""
SUFFIXES = (".safetensors", ".onnx")
"""The files that hold a model."""


class TablePredictions(NamedTuple):
    """What models say about the rows of a table."""

    labels: np.ndarray
    """The prediction of each row: names or numbers of classes, or real numbers."""
    outputs: np.ndarray
    """What the models compute, [rows, ...]."""
    probabilities: np.ndarray | None
    """[rows, classes], where outputs are scores of classes."""
    classes: tuple[str, ...]
    """The names of the classes, or of times, by column of ``probabilities``."""
    clients: tuple[str, ...] | None = None
    """Whose model each row got, where rows have different ones."""

    def columns(self, probabilities: bool = False) -> dict[str, Any]:
        """The columns of a table of predictions; rows are counted from 0."""
        found: dict[str, Any] = {"row": list(range(len(self.labels)))}
        if self.clients is not None:
            found["client"] = list(self.clients)
        found["prediction"] = [_plain(one) for one in self.labels]
        if probabilities:
            if self.probabilities is None or self.probabilities.ndim != 2:
                raise RunError("--probabilities: this model predicts no probabilities")
            for place, name in enumerate(self.classes):
                found[f"probability {name}"] = self.probabilities[:, place].tolist()
        return found


def predict_file(
    path: str | Path, source: Any, *, imports: bool = False
) -> TablePredictions:
    """Predict the rows of a table by an exported .safetensors or .onnx file.

    Args:
        path: the file.
        source: a .csv, .parquet or .npz file, a pandas or polars frame, a dict of
            columns, or an array of inputs.
        imports: whether code that the file names by import path may be imported.

    Raises:
        RunError: the file is no such model.
        DataError: the table does not fit the model.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        allowed = ", ".join(SUFFIXES)
        raise RunError(f"{path}: is neither the folder of a run nor one of {allowed}")
    if not path.is_file():
        raise RunError(f"{path}: no such file")
    if path.suffix == ".onnx":
        interop = require("fedblend_interop.onnx_predict", path.name, extra="onnx")
        return interop.predict_onnx(path, source, imports=imports)
    return predict_all(read_portable(path, imports=imports), source)


def table_of(source: Any) -> RawTable | None:
    """The columns of a source that has some."""
    if isinstance(source, str | Path):
        path = Path(source)
        return read_table(path) if path.is_file() and path.suffix in FILES else None
    return None if isinstance(source, np.ndarray) else read_table(source)


def encode_rows(of: Portable, source: Any, others: Sequence[str]) -> np.ndarray:
    """The encoded rows of a source."""
    if isinstance(source, np.ndarray) and of.preprocessing is None:
        return source
    return read_inputs(source, of.task, others=others, preprocessing=of.preprocessing)


def predict_all(
    of: Portable, source: Any, others: Sequence[str] = ()
) -> TablePredictions:
    """All rows by one model; ``others`` are columns that are no inputs."""
    return predictions_of(of, of.outputs(encode_rows(of, source, others)))


def find_client(client: int | str, names: Sequence[str]) -> int:
    """The id of a client, by its id or its name.

    A text is a name first; where no client has this name, it may be an id.
    """
    if isinstance(client, str):
        if client in names:
            return [*names].index(client)
        if not client.isdecimal():
            known = hint(client, names[:20])
            raise RunError(f"client: {client!r} is not a client of this run; {known}")
        client = int(client)
    if not 0 <= client < len(names):
        raise RunError(f"client: {client} is not between 0 and {len(names) - 1}")
    return int(client)


def predict_rows(
    model: Callable[[Any], Any],
    names: Callable[[], Sequence[str]],
    column: str | None,
    source: Any,
    client: int | str | None = None,
    *,
    shared: bool = False,
    others: Sequence[str] = (),
) -> TablePredictions:
    """The rows of a table by the model of one client, of each row's, or of all.

    Args:
        model: the model of a client, by id or name; the shared one of None.
        names: returns the names of all clients, by id.
        column: the column that named the clients in training.
        source: the table.
        client: whose model predicts all rows.
        shared: use the shared model whatever columns there are.
        others: columns that are no inputs.
    """
    if shared and client is not None:
        raise RunError("client: is given, and the shared model is asked for, too")
    table = None if client is not None or shared else table_of(source)
    if table is None or column is None or column not in table.columns:
        return predict_all(model(client), source, others)
    return predict_by_client(model, names(), table, column, others)


def predict_by_client(
    model: Callable[[int], Portable],
    names: Sequence[str],
    table: RawTable,
    column: str,
    others: Sequence[str] = (),
) -> TablePredictions:
    """Each row by the model of its own client.

    Args:
        model: the model of a client, by id.
        names: the names of all clients, by id.
        table: the rows.
        column: the column that names the client of each row.
        others: columns that are no inputs.
    """
    keys, present = labels_of(table.columns[column])
    found, ids = [str(key) for key in keys], {name: i for i, name in enumerate(names)}
    for row, name in enumerate(found):
        if not present[row] or name not in ids:
            said = f"client {name!r}" if present[row] else "no client"
            raise DataError(
                f"{table.where}: row {row} (counted from 0) has {said} in column "
                f"{column!r}, who took no part in the run; --shared predicts with the "
                "shared model"
            )
    if not found:
        raise DataError(f"{table.where}: there are no rows")
    owner = np.array([ids[name] for name in found])
    first = model(int(owner[0]))
    inputs = encode_rows(first, dict(table.columns), others)
    outputs = first.outputs(inputs)
    for client in np.unique(owner[owner != owner[0]]):
        rows = np.flatnonzero(owner == client)
        outputs[rows] = model(int(client)).outputs(inputs[rows])
    return predictions_of(first, outputs)._replace(clients=tuple(found))


def predictions_of(of: Portable, outputs: np.ndarray) -> TablePredictions:
    """Labels and probabilities from the outputs of a model."""
    from scipy.special import expit, softmax

    task = of.task
    if task.kind == "survival":
        return TablePredictions(outputs[:, 0], outputs, outputs[:, 1:], task.labels)
    if task.kind in NUMBERS:
        flat = outputs[:, 0] if outputs.ndim == 2 and outputs.shape[1] == 1 else outputs
        return TablePredictions(task.restore_unit(flat), outputs, None, ())
    scores = outputs.astype(np.float64)
    names = task.labels or tuple(map(str, range(scores.shape[-1])))
    if task.kind == "tags":
        return TablePredictions(scores > 0, outputs, expit(scores), names)
    if task.kind == "binary" and (scores.ndim == 1 or scores.shape[1] == 1):
        scores = scores.reshape(-1, 1) * np.array([0.0, 1.0])
        names = task.labels or ("0", "1")
    numbers = scores.argmax(axis=-1)
    labels = np.array(task.labels, object)[numbers] if task.labels else numbers
    if not of.probable:
        return TablePredictions(labels, outputs, None, ())
    return TablePredictions(labels, outputs, softmax(scores, axis=-1), names)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return " ".join(str(_plain(one)) for one in value)
    return value.item() if isinstance(value, np.generic) else value

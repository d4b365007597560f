# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a Parquet file to a folder of shards, a batch of rows at a time.

The file is read twice: whose rows there are and what their targets mean, then the rows,
each to its place in the folder. Clients' rows may lie anywhere in the file. Without a
column for the client every row group is one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import (
    DataError,
    Dataset,
    Kind,
    Task,
    check_rows,
    intact,
    require,
    task_of,
)
from fedblend.data.federated import held_out
from fedblend.data.readers.arrays import Raw
from fedblend.data.readers.tables import Table, check_names, read_table, stacked
from fedblend.data.readers.targets import targets_of, with_kind, with_labels
from fedblend.data.shards import about, new_folder

BATCH = 2**16
"""Rows that are read together."""
ENOUGH = 3
"""Different real numbers that show that targets are quantities."""


class Found(NamedTuple):
    """What the first reading of a file found."""

    names: np.ndarray
    """The clients, sorted."""
    counts: np.ndarray
    task: Task


def shard_table(
    path: Path,
    folder: Path,
    *,
    target: str,
    client: str | None = None,
    inputs: Sequence[str] | None = None,
    kind: Kind | None = None,
    seed: int = 0,
) -> Found:
    """Write the rows of a Parquet file to a folder of shards.

    Args:
        path: of the file; its inputs are complete numbers.
        folder: is made; must not be there.
        target: the column of the target.
        client: the column of the client of each row; a row group each if None.
        inputs: the columns of inputs; all others if None.
        kind: as of ``read``.
        seed: of the shuffle of each client's rows.
    """
    if kind not in (None, "classes", "binary", "regression"):
        raise DataError(f"kind: {kind!r} is not classes, binary or regression")
    parquet = require("pyarrow.parquet", "Parquet files")
    with intact(path, "is damaged, or no Parquet file"):
        file = parquet.ParquetFile(path)
    known = [target, *([client] if client is not None else [])]
    columns = file.schema_arrow.names
    check_names([*known, *(inputs or [])], columns, "column", path)
    chosen = [name for name in columns if name not in known]
    chosen = chosen if inputs is None else list(inputs)
    found = _looked_through(file, path, target, client, kind)
    total, width = int(found.counts.sum()), len(chosen)
    with new_folder(folder) as (beside, finish):
        shape = {"mode": "w+", "dtype": np.float32, "shape": (total, width)}
        x = np.lib.format.open_memmap(beside / "0.npy", **shape)
        real = found.task.kind == "regression"
        shape = {"mode": "w+", "dtype": np.float32 if real else np.int32}
        y = np.lib.format.open_memmap(beside / "1.npy", **shape, shape=(total,))
        places = _Places(found.counts, seed)
        for table, labels in _tables(file, path, [*known, *chosen], target, client):
            rows = stacked({name: table.columns[name] for name in chosen}, str(path))
            values = targets_of(labels[0], found.task, str(path))
            about_rows = Dataset((rows, values), found.task.kind, found.task.outputs)
            about_rows = about_rows._replace(columns=tuple(chosen))
            check_rows(about_rows, (rows, values), None, str(path))
            at = places.of(np.searchsorted(found.names, labels[1]))
            x[at], y[at] = rows, values
        x.flush()
        y.flush()
        task = found.task._replace(shape=(width,), columns=tuple(chosen))
        names = [str(name) for name in found.names]
        finish(names, found.counts, [about(x), about(y)], task)
    return found


def _tables(
    file: Any, path: Path, columns: list[str], target: str, client: str | None
) -> Iterator[tuple[Table, list[np.ndarray]]]:
    """Pieces of a file, with target and client of every row."""
    arrow = require("pyarrow", "Parquet files")
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(BATCH, [group], columns):
            table = read_table(arrow.Table.from_batches([batch]))
            table = table._replace(where=str(path))
            owner = np.full(table.rows, group) if client is None else client
            yield table, with_labels(table, target, owner, strict=True)[0]


def _looked_through(
    file: Any, path: Path, target: str, client: str | None, kind: Kind | None
) -> Found:
    """Whose rows a file has, and what its targets mean."""
    counts: Counter[Any] = Counter()
    values = np.zeros(0)
    columns = [target, *([client] if client is not None else [])]
    for _, (targets, owners) in _tables(file, path, columns, target, client):
        names, times = np.unique(owners, return_counts=True)
        counts.update(dict(zip(names.tolist(), times.tolist(), strict=True)))
        some = np.unique(targets)
        values = np.unique(np.concatenate([values, some])) if len(values) else some
        if kind == "regression" or values.dtype.kind == "f":
            values = values[:ENOUGH]
    if not counts:
        raise DataError(f"{path}: there are no rows")
    inputs = np.zeros((len(values), 1), np.float32)
    dataset = with_kind(Raw(inputs, values, None), kind, str(path), path.stem)
    names = np.array(sorted(counts))
    sizes = np.array([counts[name] for name in names.tolist()], np.int64)
    return Found(names, sizes, task_of(dataset))


class _Places:
    """Where each next row of a client goes, in the random order of its rows."""

    def __init__(self, counts: np.ndarray, seed: int):
        self._counts, self._seed = counts, seed
        self._starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self._seen = np.zeros(len(counts), np.int64)

    def of(self, owners: np.ndarray) -> np.ndarray:
        """The places of rows of these clients."""
        places = np.empty(len(owners), np.int64)
        for client in np.unique(owners).tolist():
            mine, seen = np.flatnonzero(owners == client), self._seen[client]
            rows = np.arange(int(self._counts[client]))
            order, *_ = held_out(rows, client, validation=0, test=0, seed=self._seed)
            place = np.empty_like(order)
            place[order] = rows
            places[mine] = self._starts[client] + place[seen : seen + len(mine)]
            self._seen[client] += len(mine)
        return places

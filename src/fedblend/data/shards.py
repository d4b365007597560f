# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients' rows in a folder, for federations that do not fit into memory.

An array of all rows is a ``.npy`` file, ``0.npy`` and so on, one client's rows after
the other's, each client's in random order; ``shards.json`` has the clients' names and
counts, and what the files must be. Writing takes one client at a time. Opening maps the
files: rows are read when clients compute. A folder is written beside its place and
moved there, so it is whole or not there. Nothing is ever unpickled.

``shard_table`` writes the rows of a Parquet file, a batch at a time. The file is read
twice: whose rows there are and what their targets mean, then the rows, each to its
place in the folder. Clients' rows may lie anywhere in the file. Without a column for
the client every row group is one.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedblend.checks import PART, WHOLE, gate
from fedblend.data.dataset import (
    DataError,
    Dataset,
    Kind,
    Task,
    check_kind,
    check_rows,
    intact,
    require,
    task_of,
)
from fedblend.data.federated import FederatedData, Shards, held_out, rows_held_out
from fedblend.data.readers.arrays import Raw
from fedblend.data.readers.tables import RawTable, check_names, read_table, stacked
from fedblend.data.readers.targets import targets_of, with_kind, with_labels
from fedblend.errors import UserError

INDEX, VERSION = "shards.json", 1
_DAMAGED = "is damaged, or no folder of shards"
BATCH = 2**16
"""Rows that are read together."""
ENOUGH = 3
"""Different real numbers that show that targets are quantities."""


class Index(NamedTuple):
    """What ``shards.json`` says."""

    counts: np.ndarray
    names: tuple[str, ...]
    arrays: list[dict[str, Any]]
    """Dtype, shape of a row and sha256 of each file."""
    task: dict[str, Any]
    """What targets mean, where the writer knew: kind, outputs, labels, columns."""

    @property
    def sha256(self) -> str:
        """Of all rows, and whose they are."""
        digest = hashlib.sha256(self.counts.astype("<i8").tobytes())
        for array in self.arrays:
            digest.update(json.dumps(array, sort_keys=True).encode())
        return digest.hexdigest()


@gate(seed=WHOLE)
def write_shards(
    folder: str | Path,
    clients: Iterable[tuple[str, Sequence[np.ndarray]]],
    *,
    task: Task | None = None,
    seed: int = 0,
) -> None:
    """Write clients' rows to a folder, one client at a time; see ``open_shards``.

    Args:
        folder: is made; must not be there.
        clients: name and rows of each, such as ``("ward 3", (inputs, targets))``.
        task: what targets mean, for configurations that run from the folder.
        seed: of the shuffle of each client's rows, the same as that of ``federate``.
    """
    with new_folder(folder) as beside:
        names, counts, like = [], [], []
        with ExitStack() as opened:
            files: list[IO[bytes]] = []
            for number, (name, given) in enumerate(clients):
                rows = [np.asarray(array) for array in given]
                if not files:
                    like = [array[:0] for array in rows]
                    paths = [beside / f"{place}.npy" for place in range(len(rows))]
                    files = [opened.enter_context(path.open("wb")) for path in paths]
                    _write_headers(files, like, 0)
                _check_client(name, rows, like)
                order, *_ = held_out(
                    np.arange(len(rows[0])), number, validation=0, test=0, seed=seed
                )
                for file, array in zip(files, rows, strict=True):
                    file.write(np.ascontiguousarray(array[order]).data)
                names.append(str(name))
                counts.append(len(order))
            if not counts:
                raise DataError(f"{folder}: there are no clients to write")
            _write_headers(files, like, sum(counts))
        _write_index(beside, names, counts, task)


def _check_client(name: str, rows: list[np.ndarray], like: list[np.ndarray]) -> None:
    """Refuse rows that do not fit those of the clients before."""
    found = [(array.dtype, array.shape[1:], len(array)) for array in rows]
    wanted = [(array.dtype, array.shape[1:], len(rows[0])) for array in like]
    if found != wanted or not len(rows[0]) or rows[0].dtype.hasobject:
        raise DataError(
            f"shards: client {name!r} has arrays of {found}, dtype, shape of a row and "
            f"rows of each; these must be {wanted}, with at least one row"
        )


def _write_headers(
    files: Sequence[IO[bytes]], like: Sequence[np.ndarray], rows: int
) -> None:
    """The headers of .npy files with so many rows; NumPy leaves room for any number."""
    for file, array in zip(files, like, strict=True):
        header = np.lib.format.header_data_from_array_1_0(array)
        file.seek(0)
        np.lib.format.write_array_header_1_0(
            file, header | {"fortran_order": False, "shape": (rows, *array.shape[1:])}
        )


def about(array: np.ndarray) -> dict[str, Any]:
    """What the index says of an array of all rows, read piece by piece."""
    digest = hashlib.sha256()
    step = max(2**24 // max(array[:1].nbytes, 1), 1)
    for first in range(0, len(array), step):
        digest.update(np.ascontiguousarray(array[first : first + step]).data)
    shape = list(array.shape[1:])
    return {"dtype": array.dtype.str, "shape": shape, "sha256": digest.hexdigest()}


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to write to: moved to its place at the end, or removed on failure."""
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder}: exists already and is not overwritten")
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write_index(
    folder: Path, names: Sequence[str], counts: Iterable[int], task: Task | None
) -> None:
    """Write the index of the arrays in a folder."""
    files = [folder / f"{place}.npy" for place in range(len(list(folder.iterdir())))]
    said = {
        "fedblend_shards": VERSION,
        "counts": [int(count) for count in counts],
        "names": list(names),
        "arrays": [about(np.load(file, mmap_mode="r")) for file in files],
        "task": {} if task is None else task._asdict(),
    }
    (folder / INDEX).write_text(json.dumps(said) + "\n")


def read_index(folder: str | Path) -> Index:
    """The index of a folder of shards.

    Raises:
        DataError: it is none, or of a newer version.
    """
    path = Path(folder) / INDEX
    if not path.is_file():
        raise DataError(f"{folder}: has no {INDEX}; fb.data.write_shards makes one")
    with intact(path, _DAMAGED):
        said = json.loads(path.read_text())
        if not isinstance(said, Mapping) or said["fedblend_shards"] != VERSION:
            raise DataError(f"{path}: is not of version {VERSION}, which is read here")
        counts = np.array(said["counts"], np.int64)
        found = Index(counts, tuple(said["names"]), said["arrays"], said["task"])
        if counts.ndim != 1 or len(counts) != len(found.names) or counts.min() < 1:
            raise ValueError
        return found


@gate(validation=PART, test=PART)
def open_shards(
    folder: str | Path, *, validation: float = 0.0, test: float = 0.0
) -> FederatedData:
    """The clients of a folder that ``write_shards`` wrote; rows stay in its files.

    Args:
        folder: where they are.
        validation: fraction of every client's rows held out for validation.
        test: fraction held out for testing; as of ``federate``.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "wards"
    >>> wards = ((f"ward {n}", (np.eye(4), np.arange(4))) for n in range(3))
    >>> write_shards(folder, wards)
    >>> data = open_shards(folder, test=0.25)
    >>> data.clients, data.train.total, type(data.train.examples[0]).__name__
    (3, 9, 'memmap')
    """
    if validation + test >= 1:
        raise UserError(
            "open_shards: validation + test", validation + test, "below 1, to train on"
        )
    index = read_index(folder)
    counts, total = index.counts, int(index.counts.sum())
    rows = tuple(
        _mapped(Path(folder) / f"{number}.npy", total, array)
        for number, array in enumerate(index.arrays)
    )
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    tested = rows_held_out(counts, test)
    validated = np.clip(rows_held_out(counts, validation), 0, counts - tested - 1)
    held = tested + validated
    data = FederatedData(Shards(rows, starts + held, counts - held), names=index.names)
    return dataclasses.replace(
        data,
        validation=Shards(rows, starts + tested, validated) if validation else None,
        test=Shards(rows, starts, tested) if test else None,
    )


def _mapped(path: Path, rows: int, about: Mapping[str, Any]) -> np.ndarray:
    with intact(path, _DAMAGED):
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        wanted = (rows, *about["shape"])
        if found.dtype.str != about["dtype"] or found.shape != wanted:
            raise ValueError
        return found


def dataset_in(folder: str | Path) -> Dataset:
    """The rows of a folder as a dataset, whose targets mean what its writer said.

    Raises:
        DataError: the writer did not say.
    """
    index, rows = read_index(folder), open_shards(folder).train.examples
    task = index.task
    if len(rows) != 2 or not task:
        raise DataError(
            f"{folder}: does not say what its targets are; write_shards(..., task=...) "
            "and fedblend data shard do"
        )
    with intact(Path(folder) / INDEX, _DAMAGED):
        return Dataset(
            rows,
            task["kind"],
            int(task["outputs"]),
            name=Path(folder).name,
            label_names=tuple(task["labels"]),
            columns=tuple(task["columns"]),
            log_shift=task.get("log_shift"),
            sha256=index.sha256,
        )


class FirstReading(NamedTuple):
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
) -> FirstReading:
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
    check_kind(kind)
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
    with new_folder(folder) as beside:
        shape = {"mode": "w+", "dtype": np.float32, "shape": (total, width)}
        x = np.lib.format.open_memmap(beside / "0.npy", **shape)
        real = found.task.kind == "regression"
        shape = {"mode": "w+", "dtype": np.float32 if real else np.int32}
        y = np.lib.format.open_memmap(beside / "1.npy", **shape, shape=(total,))
        places = _RowPlaces(found.counts, seed)
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
        _write_index(beside, [str(name) for name in found.names], found.counts, task)
    return found


def _tables(
    file: Any, path: Path, columns: list[str], target: str, client: str | None
) -> Iterator[tuple[RawTable, list[np.ndarray]]]:
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
) -> FirstReading:
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
    return FirstReading(names, sizes, task_of(dataset))


class _RowPlaces:
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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clients' rows in a folder, for federations that do not fit into memory.

An array of all rows is a ``.npy`` file, ``0.npy`` and so on, one client's rows after
the other's, each client's in random order; ``shards.json`` has the clients' names and
counts, and what the files must be. Writing takes one client at a time. Opening maps the
files: rows are read when clients compute. A folder is written beside its place and
moved there, so it is whole or not there. Nothing is ever unpickled.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedblend.checks import PART, WHOLE, gate
from fedblend.data.dataset import DataError, Dataset, Task, intact
from fedblend.data.federated import FederatedData, Shards, hold_out_rows, rows_held_out
from fedblend.errors import UserError

INDEX, VERSION = "shards.json", 1
_DAMAGED = "is damaged, or no folder of shards"


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
        folder: is made; must not be there, or be empty.
        clients: name and rows of each, such as ``("ward 3", (inputs, targets))``.
        task: what targets mean, for configurations that run from the folder.
        seed: of the shuffle of each client's rows, the same as that of ``federate``.
    """
    with _new_folder(folder) as beside, ExitStack() as opened:
        names, counts, like = [], [], []
        files: list[IO[bytes]] = []
        digests: list[Any] = []
        for number, (name, given) in enumerate(clients):
            rows = [np.asarray(array) for array in given]
            if not files:
                like = [array[:0] for array in rows]
                paths = [beside / f"{place}.npy" for place in range(len(rows))]
                files = [opened.enter_context(path.open("wb")) for path in paths]
                digests = [hashlib.sha256() for _ in rows]
                _write_headers(files, like, 0)
            _check_client(name, rows, like)
            order, *_ = hold_out_rows(
                np.arange(len(rows[0])), number, validation=0, test=0, seed=seed
            )
            for file, digest, array in zip(files, digests, rows, strict=True):
                content = np.ascontiguousarray(array[order]).data
                file.write(content)
                digest.update(content)
            names.append(str(name))
            counts.append(len(order))
        if not counts:
            raise DataError(f"{folder}: there are no clients to write")
        _write_headers(files, like, sum(counts))
        arrays = [
            {
                "dtype": array.dtype.str,
                "shape": list(array.shape[1:]),
                "sha256": digest.hexdigest(),
            }
            for array, digest in zip(like, digests, strict=True)
        ]
        content = {
            "fedblend_shards": VERSION,
            "counts": counts,
            "names": names,
            "arrays": arrays,
            "task": {} if task is None else task._asdict(),
        }
        (beside / INDEX).write_text(json.dumps(content) + "\n")


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


@contextmanager
def _new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to write to: moved to its place at the end, or removed on failure."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
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
        _map_file(Path(folder) / f"{number}.npy", total, array)
        for number, array in enumerate(index.arrays)
    )
    starts = np.cumsum(counts) - counts
    tested = rows_held_out(counts, test)
    validated = np.clip(rows_held_out(counts, validation), 0, counts - tested - 1)
    held = tested + validated
    data = FederatedData(Shards(rows, starts + held, counts - held), names=index.names)
    return dataclasses.replace(
        data,
        validation=Shards(rows, starts + tested, validated) if validation else None,
        test=Shards(rows, starts, tested) if test else None,
    )


def _map_file(path: Path, rows: int, about: Mapping[str, Any]) -> np.ndarray:
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
            "does"
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

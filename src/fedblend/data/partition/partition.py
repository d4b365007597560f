# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A partition: every client's row numbers, and the federated data they make."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedblend.data.dataset import (
    DataError,
    Dataset,
    MissingDataError,
    Rows,
    generator,
)
from fedblend.data.federated import FederatedData, federate, fit_preprocessing
from fedblend.data.readers.arrays import opened

_FORMAT = "fedblend partition 1"


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The row numbers of every client, and the partitioner that made them."""

    rows: tuple[np.ndarray, ...]
    """For every client, the numbers of its rows (int64)."""
    names: tuple[str, ...] = ()
    """The clients' own names; empty where they are only numbered."""
    description: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The partitioner's name and arguments."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, client: int) -> np.ndarray:
        return self.rows[client]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.rows)

    @property
    def counts(self) -> np.ndarray:
        """The number of rows of every client."""
        return np.array([len(index) for index in self.rows], np.int64)

    @property
    def hash(self) -> str:
        """The sha256 of all row numbers, in hexadecimal; names do not count."""
        digest = hashlib.sha256()
        digest.update(self.counts.astype("<i8").tobytes())
        digest.update(_flat(self.rows).astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` file atomically."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(
                    file,
                    format=np.array(_FORMAT),
                    rows=_flat(self.rows),
                    offsets=np.concatenate([[0], np.cumsum(self.counts)]),
                    names=np.array(self.names, np.str_),
                    description=np.array(json.dumps(self.description)),
                    hash=np.array(self.hash),
                )
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise DataError(f"{path}: cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Read a file of ``save``, and check its hash."""
        path = Path(path)
        if not path.is_file():
            raise MissingDataError(f"{path}: no such partition file")
        with opened(path, "is damaged, or not a partition file of fedblend") as stored:
            if str(stored["format"]) != _FORMAT:
                raise KeyError("format")
            flat, offsets = stored["rows"], stored["offsets"]
            partition = cls(
                tuple(np.split(flat.astype(np.int64), offsets[1:-1])),
                tuple(stored["names"].tolist()),
                json.loads(str(stored["description"])),
            )
            expected = str(stored["hash"])
        if partition.hash != expected:
            raise DataError(
                f"{path}: is damaged: its rows have sha256 {partition.hash[:12]}, "
                f"but {expected[:12]} was recorded"
            )
        return partition


def _flat(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)


def cut(order: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Pieces of these lengths, one after another."""
    return np.split(order.astype(np.int64), np.cumsum(counts)[:-1])


def by_owner(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of each client in ascending order; rows of no client have owner -1."""
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    return cut(order, np.bincount(owner[order], minlength=clients))


def in_proportion(weights: np.ndarray, rows: int) -> np.ndarray:
    """The owners of so many rows, in proportion to the weights of the clients."""
    share = np.cumsum(weights)
    edges = np.rint(share / share[-1] * rows).astype(np.int64)
    return np.repeat(np.arange(len(weights)), np.diff(edges, prepend=0))


def federate_dataset(
    dataset: Dataset,
    partition: Partition,
    *,
    validation: float = 0.0,
    test: float | Literal["official"] = 0.0,
    seed: int = 0,
    split: int = 0,
) -> FederatedData:
    """Divide a dataset among clients; a raw table is preprocessed.

    Args:
        dataset: the rows.
        partition: which client holds which rows.
        validation: fraction of every client's own rows held out for validation.
        test: fraction held out for testing, or "official": the dataset's own test
            set. Natural clients (``by_key``) get the test rows with their key, where
            any key matches. Otherwise the test rows of each class are divided in
            proportion to the clients' rows of that class, each row once (rows of a
            class that no client holds are left out); where rows have no single
            class, in proportion to the clients' rows.
        seed: of the held-out rows and of the shuffle.
        split: another number holds out as many of every client's rows, but others (and
            divides the official test set anew).
    """
    divided = divide(
        dataset, partition, validation=validation, test=test, seed=seed, split=split
    )
    if dataset.schema is None:
        return divided
    return divided.preprocessed(fit_preprocessing(dataset.schema, divided))


def divide(
    dataset: Dataset,
    partition: Partition,
    *,
    validation: float,
    test: float | Literal["official"],
    seed: int,
    split: int,
) -> FederatedData:
    """Divide a dataset among clients, without preprocessing; see the function above."""
    rows = len(dataset.rows[0])
    held = _flat(partition.rows)
    if held.size and (held.min() < 0 or held.max() >= rows):
        raise DataError(
            f"partition: row {held.max() if held.max() >= rows else held.min()} is not "
            f"in the dataset, whose {rows} rows are 0..{rows - 1}"
        )
    tested: dict[str, Any] = {"test": test}
    if isinstance(test, str):
        if test != "official":
            raise DataError(f'test: {test!r} is not "official" or a fraction in [0, 1)')
        if dataset.test_rows is None:
            raise DataError(
                f"test: {dataset.name or 'this dataset'} has no official test set; "
                "give a fraction in (0, 1) instead"
            )
        tested = {
            "test_rows": dataset.test_rows,
            "test_partition": _test_partition(dataset, partition, seed, split),
        }
    return federate(
        as_arrays(dataset.rows),
        partition,
        validation=validation,
        seed=seed,
        split=split,
        **tested,
    )


def as_arrays(rows: Rows) -> Rows:
    """Rows as plain arrays, those of a raw table too: for whoever preprocesses them."""
    return np.asarray(rows[0]), np.asarray(rows[1])


def _test_partition(
    dataset: Dataset, partition: Partition, seed: int, split: int
) -> list[np.ndarray]:
    """Each client's rows of the official test set; see ``federate_dataset``."""
    assert dataset.test_rows is not None
    owner = np.full(len(dataset.test_rows[1]), -1, np.int64)
    if partition.description.get("partition") == "by_key" and (
        dataset.test_keys is not None
    ):
        ids = {name: client for client, name in enumerate(partition.names)}
        known, which = np.unique(dataset.test_keys, return_inverse=True)
        owner = np.array([ids.get(str(key), -1) for key in known], np.int64)[which]
    if (owner < 0).all():
        owner = _proportional(dataset, partition, seed, split)
    return by_owner(owner, len(partition))


def _proportional(
    dataset: Dataset, partition: Partition, seed: int, split: int
) -> np.ndarray:
    """The client of each test row, in proportion to what the clients train on."""
    assert dataset.test_rows is not None
    clients = len(partition)
    holder = np.repeat(np.arange(clients), partition.counts)
    groups, test_groups = dataset.rows[1][_flat(partition.rows)], dataset.test_rows[1]
    if dataset.kind not in ("classes", "binary"):
        groups, test_groups = np.zeros(len(groups)), np.zeros(len(test_groups))
    owner = np.full(len(test_groups), -1, np.int64)
    rng = generator(seed, f"official test {split}" if split else "official test")
    for group in np.unique(test_groups):
        counts = np.bincount(holder[groups == group], minlength=clients)
        mine = rng.permutation(np.flatnonzero(test_groups == group))
        if counts.sum():
            owner[mine] = in_proportion(counts, len(mine))
    return owner

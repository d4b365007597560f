# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a partitioner gives: every client's row numbers, their hash and their file."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.data.dataset import DataError, MissingDataError
from fedblend.data.readers.npz import opened

_FORMAT = "fedblend partition 1"


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The row numbers of every client, and where they come from."""

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
        """Write to an ``.npz`` file, which appears complete or not at all."""
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
        """Read what ``save`` wrote, and check that it is still the same."""
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

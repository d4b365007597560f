# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The models of many clients in one file, whose leaves are [clients, ...].

The layout is that of ``serialize``. A file is written block by block and read client by
client through a memory map, so that neither holds all models in memory. The checksum is
that of the whole file; a reader checks it where the file is small.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.simulation.io.serialize import (
    DAMAGE,
    WireError,
    array_at,
    checksum,
    header_bytes,
    named_leaves,
    not_through_links,
    places_of,
    raw,
    read_header,
    sync,
)

CHECKED_BYTES = 2**26
"""Files up to this size are checked as a whole when they are opened."""
CHUNK = 2**20
"""Bytes of the data that are read at once for the checksum."""
UNKNOWN = "0" * 64
"""Takes the place of the checksum until all data is written."""


class StackWriter:
    """Writes models one after another; the file is whole at its place, or absent.

    Args:
        path: of the file; the data is written beside it and moved there at the end.
        template: one client's model, or its shapes and dtypes.
        clients: how many models there will be.
        metadata: words about them.
    """

    def __init__(
        self, path: Path, template: PyTree, clients: int, metadata: Mapping[str, str]
    ):
        stacked = {
            name: jax.ShapeDtypeStruct((clients, *leaf.shape), leaf.dtype)
            for name, leaf in named_leaves(template).items()
        }
        self._path, self._beside = path, path.with_name(path.name + ".new")
        self._header, self._words = places_of(stacked), dict(metadata)
        head = header_bytes({**self._words, "sha256": UNKNOWN}, self._header)
        self._start, self._written, self._clients = len(head), 0, clients
        self._file = open(self._beside, "w+b", opener=not_through_links)  # noqa: SIM115

    def __enter__(self) -> "StackWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            # Half a file would keep a full disk full.
            self._beside.unlink(missing_ok=True)

    def add(self, models: PyTree) -> None:
        """Write the models of the next clients, stacked: leaves [clients, ...]."""
        leaves = {name: np.asarray(one) for name, one in named_leaves(models).items()}
        for name, leaf in leaves.items():
            begin, _ = self._header[name]["data_offsets"]
            size = leaf.nbytes // len(leaf)
            self._file.seek(self._start + begin + self._written * size)
            self._file.write(raw(leaf))
        self._written += len(next(iter(leaves.values())))

    def _finish(self) -> None:
        if self._written != self._clients:
            raise ValueError(f"{self._written} of {self._clients} models are written")
        self._words["sha256"] = checksum(self._words, self._header, self._data())
        self._file.seek(0)
        self._file.write(header_bytes(self._words, self._header))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._beside, self._path)
        sync(self._path.parent)

    def _data(self) -> Iterator[bytes]:
        self._file.seek(self._start)
        while chunk := self._file.read(CHUNK):
            yield chunk


class StackReader:
    """The models of a file, one by one; ``metadata`` are the words about them.

    Raises:
        WireError: the file is damaged.
    """

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise WireError("not a fedblend file: it is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._header, self.metadata, self._body = read_header(memoryview(mapped))
        expected = self.metadata.pop("sha256", None)
        if size <= CHECKED_BYTES:
            found = checksum(self.metadata, self._header, [self._body])
            if found != expected:
                raise WireError("data is damaged: its checksum does not match")
        try:
            (self.clients,) = {entry["shape"][0] for entry in self._header.values()}
        except DAMAGE as error:
            raise WireError(f"header is damaged ({type(error).__name__})") from None

    def model(self, client: int) -> dict[str, np.ndarray]:
        """The leaves of one client's model, by name."""
        return {name: np.array(leaf[client]) for name, leaf in self.stacked().items()}

    def stacked(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """The leaves of all clients, [clients, ...], in the mapped file."""
        chosen: dict[str, Any] = self._header
        if names is not None:
            chosen = {name: self._header[name] for name in names}
        try:
            return {name: array_at(self._body, chosen[name]) for name in chosen}
        except DAMAGE as error:
            raise WireError(f"header is damaged ({type(error).__name__})") from None

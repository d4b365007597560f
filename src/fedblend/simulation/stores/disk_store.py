# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Client states in memory-mapped files that survive a crash at any moment.

The store keeps what a block changed apart (``pending``) until the next block begins. A
checkpoint saved in between holds these rows too, and restoring it writes them again:
whenever a process is killed, files and the last block's checkpoint agree. Files that
went on further than that, or were never this run's, are refused.

A small file beside the others, its stamp, names the run that writes them and counts how
often rows were written. The count moves before the rows do: files whose count is not
the checkpoint's hold rows that the checkpoint knows nothing about.

A worker fetches a block's changes from the device, and writes them to the files when
the next block has begun. To bring rows ahead of time files are only read: a block that
is being prepared leaves no trace.
"""

import os
import secrets
import shutil
import tempfile
import weakref
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np

from fedblend import trees
from fedblend.core import PyTree
from fedblend.simulation.stores.device_store import ONE_DEVICE, Slots
from fedblend.simulation.stores.host_store import HostStore, fetch


class DiskStore(HostStore):
    """All states in memory-mapped files; changes of a block wait to be written.

    Args:
        template: as of ``HostStore``.
        clients: likewise.
        room: likewise.
        folder: of the files; a temporary one if None.
        slots: likewise.
    """

    kind = "disk"

    def __init__(
        self,
        template: PyTree,
        clients: int,
        room: int,
        folder: Path | None,
        slots: Slots = ONE_DEVICE,
    ):
        self.folder = Path(folder or tempfile.mkdtemp("-fedblend"))
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stamp = Stamp(self.folder)
        self.pending: tuple[np.ndarray, list[Future]] | None = None
        super().__init__(template, clients, room, slots)

    def _open(self, number: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        path = self.folder / f"{number}.npy"
        # NumPy's files know no bfloat16: they hold its bytes.
        held = dtype if dtype.isbuiltin == 1 else np.dtype((np.void, dtype.itemsize))
        if path.exists():
            there = np.lib.format.open_memmap(path, mode="r+")
            if there.shape == shape and there.dtype == held:
                return there.view(dtype)
        self.stamp.path.unlink(missing_ok=True)
        fresh = np.lib.format.open_memmap(path, mode="w+", dtype=held, shape=shape)
        return fresh.view(dtype)

    def reserve(self, ids: np.ndarray) -> None:
        """Give all of these clients a slot; what waited now goes to the files."""
        if self.pending is not None:
            self.take_away(self.pending[0], self._flush, *self.pending)
            self.pending = None
        super().reserve(ids)

    def _let_go(self, ids: np.ndarray) -> None:
        """The files have the rows of clients who lose their slots."""

    def _release(self, ids: np.ndarray) -> None:
        """Files stay as they are."""

    def _flush(self, ids: np.ndarray, rows: list[Future]) -> None:
        self.stamp.write(self.stamp.count + 1)
        for group, job in zip(self.groups(ids), rows, strict=True):
            self.take_back(group, job.result())

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Take back the buffer, and keep apart what the block changed."""
        self.buffer, members = states, np.unique(ids)
        groups = map(self._rows_of, self.groups(members))
        self.pending = members, [self._leaving.submit(fetch, rows) for rows in groups]

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients; from now on the files are this run's."""
        self.stamp.claim()
        super().write(ids, states)

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold: the last block's rows, and who is known."""
        self.wait()
        jax.tree.map(lambda leaf: leaf.flush(), self.states)
        self.stamp.claim()
        if self.pending is None:
            return self.template(0)
        ids, jobs = self.pending
        groups = [
            trees.take(job.result(), slice(len(group)))
            for group, job in zip(self.groups(ids), jobs, strict=True)
        ]
        return {**self.template(0), "ids": ids, "rows": trees.concatenate(groups)}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        count = np.array(self.stamp.count, np.int64)
        facts = {"known": self.known, "run": self.stamp.run, "count": count}
        if changed == 0:
            return facts
        ids = jax.ShapeDtypeStruct((changed,), np.dtype(np.int64))
        return {**facts, "ids": ids, "rows": trees.shapes(self._template, changed)}

    def restore(self, snapshot: PyTree) -> None:
        """Write the last block's rows again; the files may have got that far."""
        self.wait()
        count = int(snapshot["count"])
        waits = "ids" in snapshot
        self.stamp.adopt(snapshot["run"], count, count + waits)
        self.pending = None
        self._clear(np.array(snapshot["known"]))
        if waits:
            self.write(np.array(snapshot["ids"]), snapshot["rows"])
            self.stamp.write(count + 1)


class StoreError(ValueError):
    """Files of a disk store that do not belong to a checkpoint."""


class Stamp:
    """The stamp of a folder: eight bytes that name a run, and a count."""

    def __init__(self, folder: Path):
        self.path = folder / "stamp"
        self.run = np.frombuffer(secrets.token_bytes(8), np.uint8)
        self.count = 0
        self.claimed = False

    def claim(self) -> None:
        """Mark the folder as this run's, unless it is already."""
        if not self.claimed:
            self.write(self.count)

    def write(self, count: int) -> None:
        """Mark the folder as this run's, rows written ``count`` times."""
        self.count, self.claimed = count, True
        beside = self.path.with_name("stamp.new")
        beside.write_text(f"{self.run.tobytes().hex()} {count}\n")
        os.replace(beside, self.path)

    def adopt(self, run: np.ndarray, count: int, most: int) -> None:
        """Go on with files written by this run, ``count`` to ``most`` times."""
        try:
            name, found = self.path.read_text().split()
            found = int(found)
        except (OSError, ValueError):
            raise StoreError(
                f"{self.path.parent} lacks the clients' states of this checkpoint"
            ) from None
        if name != run.tobytes().hex():
            raise StoreError(f"{self.path.parent} has the states of another run")
        if not count <= found <= most:
            raise StoreError(
                f"{self.path.parent} has the states of another moment "
                f"(written {found} times, not {count})"
            )
        self.run, self.count, self.claimed = np.array(run), found, True

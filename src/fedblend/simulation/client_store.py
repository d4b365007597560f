# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where client states live between rounds: on the device, in memory, or on disk.

All stores hand a block of rounds its states as one stacked tree and the slot of every
client in it. The device store hands out everything and its slots are the ids; the
others hand out the clients of the block, so that neither the price of a round nor the
device's memory grows with the number of clients.

The disk store keeps what a block changed apart (``pending``) until the next block
begins. A checkpoint saved in between holds these rows too, and restoring it writes
them again: whenever a process is killed, files and the last block's checkpoint agree.
Files that went on further than that, or were never this run's, are refused.

A small file beside those of a disk store, its stamp, names the run that writes them and
counts how often rows were written. The count moves before the rows do: files whose
count is not the checkpoint's hold rows that the checkpoint knows nothing about.
"""

import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.checks import words
from fedblend.core import PyTree

DEVICE_BYTES = 2**30
"""States up to this size stay on the device."""
HOST_BYTES = 8 * 2**30
"""States up to this size stay in memory, larger ones go to disk."""


def choose(template: PyTree, clients: int) -> str:
    """The kind of store for this many states like ``template``."""
    size = clients * sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(template)
    )
    if size <= DEVICE_BYTES:
        return "device"
    return "host" if size <= HOST_BYTES else "disk"


def open_store(kind: str, template: PyTree, clients: int, folder: Path | None = None):
    """A store for the states of all clients, each like ``template``.

    Leaves of the template have the replicas of a sweep, if any, in front.
    """
    words("auto", "device", "host", "disk")("store", kind)
    if kind == "auto":
        kind = choose(template, clients)
    if kind == "disk":
        return DiskStore(template, clients, folder)
    return {"device": DeviceStore, "host": HostStore}[kind](template, clients)


class _Store:
    """All states in one stacked tree; ``known`` are the clients that have one."""

    arrays: Any
    """The library whose arrays the states are."""

    def __init__(self, template: PyTree, clients: int):
        self.states = jax.tree.map(
            lambda leaf: self.arrays.zeros((clients, *leaf.shape), leaf.dtype), template
        )
        self.known = np.zeros(clients, bool)

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold."""
        return {"states": self.states, "known": self.known}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        del changed
        return self.snapshot()

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        self.states = jax.tree.map(self.arrays.array, snapshot["states"])
        self.known = np.array(snapshot["known"])


class DeviceStore(_Store):
    """All states on the device; a block sees all of them."""

    kind, eager, arrays = "device", True, jnp

    def load(self, ids: np.ndarray, room: int) -> tuple[PyTree, np.ndarray]:
        """The states a block needs, and the slot of each id."""
        del room
        return self.states, ids

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Take back what ``load`` gave."""
        del ids
        self.states = states

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, stacked."""
        return trees.take(self.states, jnp.asarray(ids))

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients."""
        self.states = jax.tree.map(
            lambda all, new: all.at[jnp.asarray(ids)].set(new), self.states, states
        )
        self.known[ids] = True


class HostStore(_Store):
    """All states in memory; a block sees only its own clients."""

    kind, eager, arrays = "host", False, np

    def load(self, ids: np.ndarray, room: int) -> tuple[PyTree, np.ndarray]:
        """The states a block needs, padded to ``room``, and the slot of each id."""
        members, slots = np.unique(ids, return_inverse=True)
        padded = np.concatenate([members, np.full(room - len(members), members[0])])
        return self.gather(padded), slots.reshape(ids.shape)

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Take back what ``load`` gave."""
        self.write(*_changed(ids, states))

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, stacked, on the device."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[ids]), self.states)

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients."""

        def put(all, new):
            all[ids] = np.asarray(new)

        jax.tree.map(put, self.states, states)
        self.known[ids] = True


def _changed(ids: np.ndarray, states: PyTree) -> tuple[np.ndarray, PyTree]:
    """The clients of a block and their states, on the host.

    Sliced there: on the device every new length would be compiled.
    """
    members = np.unique(ids)
    return members, trees.take(jax.device_get(states), slice(len(members)))


class DiskStore(HostStore):
    """All states in memory-mapped files; changes of a block wait to be written."""

    kind = "disk"

    def __init__(self, template: PyTree, clients: int, folder: Path | None):
        self.folder = Path(folder or tempfile.mkdtemp("-fedblend"))
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stamp = Stamp(self.folder)
        leaves, structure = jax.tree.flatten(template)
        files = [
            self._open(number, (clients, *leaf.shape), np.dtype(leaf.dtype))
            for number, leaf in enumerate(leaves)
        ]
        self.states = jax.tree.unflatten(structure, files)
        self.known = np.zeros(clients, bool)
        self.pending: tuple[np.ndarray, PyTree] | None = None

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

    def load(self, ids: np.ndarray, room: int) -> tuple[PyTree, np.ndarray]:
        """The states a block needs; what waited is now written to the files."""
        self.flush()
        return super().load(ids, room)

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Keep apart what a block changed."""
        self.pending = _changed(ids, states)

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, newest first, stacked."""
        rows = jax.tree.map(lambda leaf: np.array(leaf[ids]), self.states)
        if self.pending is not None:
            members, newest = self.pending
            place = np.minimum(np.searchsorted(members, ids), len(members) - 1)
            changed = members[place] == ids

            def overlay(row, new):
                row[changed] = new[place[changed]]

            jax.tree.map(overlay, rows, newest)
        return jax.tree.map(jnp.asarray, rows)

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients; from now on the files are this run's."""
        self.stamp.claim()
        super().write(ids, states)

    def flush(self) -> None:
        """Write what waited to the files."""
        if self.pending is not None:
            self.stamp.write(self.stamp.count + 1)
            self.write(*self.pending)
            self.pending = None

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold: the last block's rows, and who is known."""
        jax.tree.map(lambda leaf: leaf.flush(), self.states)
        self.stamp.claim()
        facts = self._facts()
        if self.pending is None:
            return facts
        ids, rows = self.pending
        return {**facts, "ids": ids, "rows": rows}

    def _facts(self) -> dict[str, np.ndarray]:
        count = np.array(self.stamp.count, np.int64)
        return {"known": self.known, "run": self.stamp.run, "count": count}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        if changed == 0:
            return self._facts()
        rows = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((changed, *leaf.shape[1:]), leaf.dtype),
            self.states,
        )
        ids = jax.ShapeDtypeStruct((changed,), np.dtype(np.int64))
        return {**self._facts(), "ids": ids, "rows": rows}

    def restore(self, snapshot: PyTree) -> None:
        """Write the last block's rows again; the files may have got that far."""
        count = int(snapshot["count"])
        waits = "ids" in snapshot
        self.stamp.adopt(snapshot["run"], count, count + waits)
        self.known = np.array(snapshot["known"])
        self.pending = None
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

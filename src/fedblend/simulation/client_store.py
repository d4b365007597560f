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
"""

import shutil
import tempfile
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import PyTree
from fedblend.simulation.store_version import Stamp

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
    if kind == "auto":
        kind = choose(template, clients)
    if kind == "device":
        return DeviceStore(template, clients)
    if kind == "host":
        return HostStore(template, clients)
    if kind == "disk":
        return DiskStore(template, clients, folder)
    raise ValueError(
        f"store: {kind!r} is unknown, it is 'auto', 'device', 'host' or 'disk'"
    )


class DeviceStore:
    """All states in one stacked tree on the device."""

    kind = "device"
    eager = True

    def __init__(self, template: PyTree, clients: int):
        self.states = jax.tree.map(
            lambda leaf: jnp.zeros((clients, *leaf.shape), leaf.dtype), template
        )
        self.known = np.zeros(clients, bool)

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

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold."""
        return {"states": self.states, "known": self.known}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        del changed
        return self.snapshot()

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        self.states = jax.tree.map(jnp.asarray, snapshot["states"])
        self.known = np.array(snapshot["known"])


class HostStore:
    """All states in NumPy arrays in memory; a block sees only its own clients."""

    kind = "host"
    eager = False

    def __init__(self, template: PyTree, clients: int):
        self.states = jax.tree.map(
            lambda leaf: np.zeros((clients, *leaf.shape), leaf.dtype), template
        )
        self.known = np.zeros(clients, bool)

    def load(self, ids: np.ndarray, room: int) -> tuple[PyTree, np.ndarray]:
        """The states a block needs, padded to ``room``, and the slot of each id."""
        members, slots = np.unique(ids, return_inverse=True)
        padded = np.concatenate([members, np.full(room - len(members), members[0])])
        return self.gather(padded), slots.reshape(ids.shape)

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Take back what ``load`` gave."""
        members = np.unique(ids)
        # Sliced on the host: on the device every new length would be compiled.
        self.write(members, trees.take(jax.device_get(states), slice(len(members))))

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, stacked, on the device."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[ids]), self.states)

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients."""

        def put(all, new):
            all[ids] = np.asarray(new)

        jax.tree.map(put, self.states, states)
        self.known[ids] = True

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold."""
        return {"states": self.states, "known": self.known}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        del changed
        return self.snapshot()

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        self.states = jax.tree.map(np.array, snapshot["states"])
        self.known = np.array(snapshot["known"])


class DiskStore(HostStore):
    """All states in memory-mapped files; changes of a block wait to be kept."""

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
        self.stamp.remove()
        fresh = np.lib.format.open_memmap(path, mode="w+", dtype=held, shape=shape)
        return fresh.view(dtype)

    def load(self, ids: np.ndarray, room: int) -> tuple[PyTree, np.ndarray]:
        """The states a block needs; what waited is now written to the files."""
        self.flush()
        return super().load(ids, room)

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Keep apart what a block changed."""
        members = np.unique(ids)
        rows = trees.take(jax.device_get(states), slice(len(members)))
        self.pending = (members, rows)

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
        kept = self._kept()
        if self.pending is None:
            return kept
        ids, rows = self.pending
        return {**kept, "ids": ids, "rows": rows}

    def _kept(self) -> dict[str, np.ndarray]:
        count = np.array(self.stamp.count, np.int64)
        return {"known": self.known, "run": self.stamp.run, "count": count}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        if changed == 0:
            return self._kept()
        rows = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((changed, *leaf.shape[1:]), leaf.dtype),
            self.states,
        )
        ids = jax.ShapeDtypeStruct((changed,), np.dtype(np.int64))
        return {**self._kept(), "ids": ids, "rows": rows}

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

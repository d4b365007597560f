# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Client states in memory or files, and a buffer on the device of those lately used.

A block of rounds runs on the buffer: the clients of a block get slots in it, where they
stay until others need them, longest unused first. Only rows of clients that are not
there are brought; of those that leave, only what the files or memory lack goes back. A
client that joins is enrolled right into its slot.

Rows travel in groups of a fixed size, so that nothing is compiled anew. While the
device computes, one worker brings the rows of the next block (``stage``), and another
takes away those that left; a row that is still on its way out is waited for. A block's
own changes are in the buffer alone until a row leaves; whoever reads (``gather``,
``snapshot``) waits for the worker and sees the newest.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from fedblend.core import PyTree
from fedblend.simulation import devices
from fedblend.simulation.devices import LARGE, Worker, copy_rows
from fedblend.simulation.stores.device_store import (
    ONE_DEVICE,
    Slots,
    Store,
    extract,
    insert,
    pad_slots,
)

CACHE_SHARE = 0.8
"""Of the device's free memory, for the buffer of a store that is elsewhere."""
GROUP_BYTES = 2**26
"""Rows that travel together: few enough to wait for, many enough to be worth it."""
BRINGING = 2
"""Threads that bring rows: one alone does not fill the way to a GPU."""


class HostStore(Store):
    """All states in memory; a buffer on the device holds those lately used.

    The memory of a state in the buffer is given back where that is worth it.

    Args:
        template: as of ``Store``.
        clients: likewise.
        room: clients that a block needs at once, at most.
        slots: likewise.
    """

    kind = "host"

    def __init__(
        self, template: PyTree, clients: int, room: int, slots: Slots = ONE_DEVICE
    ):
        super().__init__(template, clients, slots)
        self._room = room
        leaves, structure = jax.tree.flatten(template)
        shapes = [(clients, *leaf.shape) for leaf in leaves]
        states = [
            self._open(number, shape, np.dtype(leaf.dtype))
            for number, (shape, leaf) in enumerate(zip(shapes, leaves, strict=True))
        ]
        self.states = jax.tree.unflatten(structure, states)
        self._clear(self.known)

    def _open(self, number: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Zeros that take no memory before they are written, for a leaf of states."""
        del number
        if int(np.prod(shape[1:])) * dtype.itemsize < LARGE:
            return np.zeros(shape, dtype)
        # Not reserved: a store may be larger than what will ever be written of it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        flags |= getattr(mmap, "MAP_NORESERVE", 0)
        pages = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, flags=flags)
        return np.frombuffer(pages, np.uint8).view(dtype).reshape(shape)

    def _clear(self, known: np.ndarray) -> None:
        """Nothing is in the buffer; these clients have states in memory or files."""
        self.known, self.buffer = known, None
        self._bringing, self._leaving = Worker(BRINGING), Worker()
        self._on_the_way: list[tuple[np.ndarray, Future]] = []
        self._slot_of = np.full(len(known), -1, np.int32)
        self._staged: tuple[np.ndarray, list[Future]] = (np.zeros(0, int), [])

    def wait(self) -> None:
        """Wait until all rows that leave are away."""
        self._leaving.wait()

    def _make_buffer(self) -> None:
        """A buffer for ``room`` clients at least, and as many as fit a device."""
        if self.buffer is not None:
            return
        one = max(devices.bytes_of(self._template), 1)
        free = devices.free_device()
        more = 0 if free is None else int(CACHE_SHARE * free) // one
        slots = self._slots.number(min(max(self._room, more), len(self.known)))
        self._group = max(min(GROUP_BYTES // one, self._room), 1)
        self.buffer = self._slots.zeros(self._template, slots)
        self._owner = np.full(slots, -1, np.int64)
        self._used = np.zeros(slots, np.int64)
        self._clock = 0

    def groups(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """These rows in groups that travel together."""
        for first in range(0, len(rows), self._group):
            yield rows[first : first + self._group]

    def stage(self, ids: np.ndarray) -> None:
        """Begin to bring the rows that a block of these clients will need."""
        self._make_buffer()
        members = np.unique(ids)
        away = members[self.known[members] & (self._slot_of[members] < 0)]
        self._on_the_way = [(of, job) for of, job in self._on_the_way if not job.done()]
        waits = np.isin(away, np.concatenate([[], *(of for of, _ in self._on_the_way)]))
        away = np.concatenate([away[~waits], away[waits]])
        jobs = [
            self._bringing.submit(self._bring, group, self._group, self._writers(group))
            for group in self.groups(away)
        ]
        self._staged = away, jobs

    def _writers(self, ids: np.ndarray) -> list[Future]:
        """What has to be done before the rows of these clients are read."""
        return [job for of, job in self._on_the_way if np.isin(of, ids).any()]

    def _bring(
        self, ids: np.ndarray, length: int, before: Sequence[Future] = ()
    ) -> PyTree:
        """The rows of these clients on the device, as the first of so many."""
        for job in before:
            job.result()

        def some(rows: np.ndarray) -> np.ndarray:
            found = np.empty((length, *rows.shape[1:]), rows.dtype)
            copy_rows(found, np.arange(len(ids)), rows, ids)
            return found

        return jax.device_put(jax.tree.map(some, self.states))

    def reserve(self, ids: np.ndarray) -> None:
        """Give all of these clients a slot; the rows of those who are known follow."""
        self._make_buffer()
        members = np.unique(ids)
        new = members[self._slot_of[members] < 0]
        if len(new):
            self._assign(members, new)
            staged, jobs = self._staged
            self._staged = (np.zeros(0, int), [])
            self._put(staged, [job.result() for job in jobs])
            late = np.setdiff1d(new[self.known[new]], staged)
            groups = self.groups(late)
            rows = (self._bring(one, self._group, self._writers(one)) for one in groups)
            self._put(late, rows)
        self._clock += 1
        self._used[self._slot_of[members]] = self._clock

    def _assign(self, members: np.ndarray, new: np.ndarray) -> None:
        """Slots for the new among the members: those that others used least lately."""
        here = self._slot_of[members]
        used = self._used.copy()
        used[here[here >= 0]] = np.iinfo(used.dtype).max
        slots = np.argpartition(used, len(new) - 1)[: len(new)]
        leaving = slots[self._owner[slots] >= 0]
        self._let_go(self._owner[leaving])
        self._slot_of[self._owner[leaving]] = -1
        self._owner[slots], self._slot_of[new] = new, slots

    def _let_go(self, ids: np.ndarray) -> None:
        """Take the rows of clients who lose their slots away."""
        for group in self.groups(ids):
            self.take_away(group, self.take_back, group, self._rows_of(group))

    def take_away(
        self, ids: np.ndarray, job: Callable[..., None], *arguments: Any
    ) -> None:
        """Begin a job that writes these clients' rows; who reads them waits for it."""
        self._on_the_way.append((ids, self._leaving.submit(job, *arguments)))

    def _rows_of(self, ids: np.ndarray) -> PyTree:
        """The rows of a group of clients who have slots, on the device."""
        slots = pad_slots(self._slot_of[ids], self._group, 0)
        return extract(self.buffer, slots)

    def take_back(self, ids: np.ndarray, rows: PyTree) -> None:
        """Write rows of the device to memory or files."""
        jax.tree.map(
            lambda all, new: copy_rows(all, ids, new, np.arange(len(ids))),
            self.states,
            fetch(rows),
        )

    def _put(self, ids: np.ndarray, rows: Any) -> None:
        """Put rows that came, group by group, into the slots of these clients."""
        for group, one in zip(self.groups(ids), rows, strict=True):
            self._insert(group, one)
            self._release(group)

    def _insert(self, ids: np.ndarray, rows: PyTree) -> None:
        for leaf in jax.tree.leaves(rows)[:1]:
            slots = pad_slots(self._slot_of[ids], len(leaf), len(self._owner))
            self.buffer = insert(self.buffer, slots, rows)

    def _release(self, ids: np.ndarray) -> None:
        """Give back the memory of states that are in the buffer now."""
        for leaf in jax.tree.leaves(self.states):
            _give_back(leaf, ids)

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Where the states of clients with a slot are in the buffer."""
        return self._slot_of[ids]

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, stacked, on the device."""
        self.wait()
        ids = np.asarray(ids)
        slots = self._slot_of[ids]
        if (slots < 0).all():
            return self._bring(ids, len(ids))
        found = extract(self.buffer, np.maximum(slots, 0))
        for places in self.groups(np.flatnonzero(slots < 0)):
            rows = self._bring(ids[places], self._group)
            found = insert(found, pad_slots(places, self._group, len(ids)), rows)
        return found

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients, which are the first ones of ``states``."""
        self.known[ids] = True
        if not jax.tree.leaves(states):
            return
        if (self._slot_of[ids] >= 0).all():
            self._insert(ids, states)
        else:
            self.wait()
            self.take_back(ids, states)

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold."""
        self.wait()
        if self.buffer is not None:
            for group in self.groups(self._owner[self._owner >= 0]):
                self.take_back(group, self._rows_of(group))
        return {"states": self.states, "known": self.known}

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        self.wait()
        jax.tree.map(np.copyto, self.states, snapshot["states"])
        self._clear(np.array(snapshot["known"]))


def fetch(rows: PyTree) -> PyTree:
    """Rows of a device, on the host; a GPU writes fastest to memory that is pinned."""
    for leaf in jax.tree.leaves(rows)[:1]:
        device, *others = leaf.devices() if isinstance(leaf, jax.Array) else [None]
        if device is not None and not others and device.platform == "gpu":
            pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
            rows = jax.device_put(rows, pinned)
    return jax.tree.map(np.asarray, rows)


def _give_back(states: np.ndarray, ids: np.ndarray) -> None:
    """Return the whole pages of these rows, which nobody reads before they change."""
    pages, one = states.base, states[:1].nbytes
    while isinstance(pages, np.ndarray):
        pages = pages.base
    if not isinstance(pages, mmap.mmap) or one < LARGE:
        return
    for id in ids.tolist():
        first = -(-id * one // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (id + 1) * one // mmap.PAGESIZE * mmap.PAGESIZE
        pages.madvise(mmap.MADV_DONTNEED, first, last - first)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The clients of a simulation: their rows, weights and states, as blocks take them.

Clients are enrolled when they are first needed, all at once where the server waits for
what enrollment sends, or where states live on the device. What a block needs is planned
while the device computes the one before.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import PyTree, Shard
from fedblend.data.federated import Shards
from fedblend.simulation import devices
from fedblend.simulation.aggregators import RunningSum, empty, replace_mean
from fedblend.simulation.devices import Cut, Worker, bytes_of
from fedblend.simulation.engine import Engine
from fedblend.simulation.rounds import Members
from fedblend.simulation.sampling import NOBODY, Weights
from fedblend.simulation.stores.client_store import Storage, choose_kind, open_store
from fedblend.simulation.stores.device_store import DeviceStore, extract, pad_slots
from fedblend.simulation.stores.host_store import HostStore
from fedblend.simulation.stores.row_store import DeviceRows, HostRows, Packed

ENROLL_AT_ONCE = 1024
"""Clients enrolled in one call."""
AT_ONCE_BYTES = 2**30
"""States enrolled or measured in one call; bounds the memory it takes."""
PART_BYTES = 2**33
"""States and rows that are brought to the device for a part of a block."""

Places = dict[str, tuple[jax.Array, jax.Array]]
"""Where the rows of some clients start in each split, and how many they are."""


class Plan(NamedTuple):
    """Cohorts of a block, [keys, rounds, cohort], and how to get their rows.

    Where nobody is ``present`` another client of the block stands in.
    """

    ids: np.ndarray
    present: np.ndarray
    train: Callable[[], Packed]
    members: Members | None
    """On the device, where nothing has to be waited for."""


class CohortLoader:
    """Rows, weights and states of all clients.

    Args:
        engine: the compiled functions.
        rows: of all splits that are used.
        splits: where they are, by name.
        weights: the clients' weights.
        cohort: clients of a round.
        every: rounds of a block.
        storage: where states live.
    """

    def __init__(
        self,
        engine: Engine,
        rows: DeviceRows | HostRows,
        splits: Mapping[str, Shards],
        weights: Weights,
        *,
        cohort: int,
        every: int,
        storage: Storage,
    ):
        self.train, self._rows, self._splits = splits["train"], rows, splits
        self._engine, self._weights, self._replicas = engine, weights, engine.replicas
        self.number = len(self.train.counts)
        self._places: slice | int | None = None
        first = self._members(np.zeros(1, int), np.zeros(1, int))
        self.shapes = engine.shapes(trees.take(first, 0))
        self._template = self.stack_replicas(self.shapes.state)
        self._storage, self._packing = storage, Worker()
        self.cut = Cut(cohort, engine.settings.chunk)
        kind = choose_kind(storage.states, self._template, self.number)
        brought = bytes_of(self._template) if kind == "host" else 0
        if rows.kind == "host":
            brought += self.train.capacity * _row_bytes(self.train)
        # A store on disk keeps the changes of a block together.
        self.rounds_at_once = every
        if kind != "disk" and brought:
            self.rounds_at_once = min(max(PART_BYTES // (brought * cohort), 1), every)
        draws = cohort * self.rounds_at_once
        draws *= len(engine.key) if engine.keys == 0 else 1
        self._room = min(self.number, draws)
        self.store = self._open(kind)
        self._enrolls = min(ENROLL_AT_ONCE, self.number)
        if not self.joins:
            few = max(AT_ONCE_BYTES // max(bytes_of(self._template), 1), 1)
            self._enrolls = min(self._enrolls, few)
            if not self.store.eager:
                self._enrolls = min(self._enrolls, self._room)

    def select_replicas(self, places: slice | int) -> "CohortLoader":
        """The same clients, of whom only some replicas are seen."""
        found = copy.copy(self)
        found._places = places
        return found

    def reopen(self, kind: str) -> None:
        """Use this kind of store, if the kind was left open and it is another."""
        known = kind in ("device", "host", "disk")
        if known and self._storage.states == "auto" and self.store.kind != kind:
            self.store = self._open(kind)

    def _open(self, kind: str) -> DeviceStore | HostStore:
        sizes, folder = (self.number, self._room), self._storage.folder
        return open_store(kind, self._template, *sizes, folder, self._engine.slots)

    @property
    def stay(self) -> bool:
        """Whether all rows and states lie on the device."""
        return self._rows.kind == "device" and self.store.kind == "device"

    @property
    def joins(self) -> bool:
        """Whether enrollment sends anything to the server."""
        return bool(jax.tree.leaves(self.shapes.join))

    def stack_replicas(self, shapes: PyTree) -> PyTree:
        """Shapes of one replica as they are in this run."""
        ahead = () if self._replicas is None else (self._replicas,)
        return trees.shapes(shapes, *ahead)

    def _members(
        self,
        ids: np.ndarray,
        starts: np.ndarray,
        slots: np.ndarray | None = None,
        present: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> Members:
        """Arrays over these clients, as the compiled functions take them."""
        present = np.ones(ids.shape, bool) if present is None else present
        weights = self._weights.rounds if weights is None else weights
        number = jax.dtypes.canonicalize_dtype(float)
        return Members(
            ids=ids.astype(np.int32),
            slots=np.asarray(ids if slots is None else slots, np.int32),
            starts=starts.astype(np.int32),
            counts=self.train.counts[ids].astype(np.int32),
            weights=(weights[ids] * present).astype(number),
            present=present,
        )

    def enroll_first(self) -> RunningSum:
        """Enroll whom the server waits for; the sum of what they send."""
        joined = None
        if self.joins or self.store.eager:
            joined = self.enroll(np.arange(self.number))
        if joined is not None and self.joins:
            return joined
        nothing = empty(self.shapes.join)
        if self._replicas is None:
            return nothing
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (self._replicas, *leaf.shape)), nothing
        )

    def enroll(self, ids: np.ndarray) -> RunningSum | None:
        """Enroll those of these clients who are not; the sum of what they send."""
        if not jax.tree.leaves((self.shapes.join, self.shapes.state)):
            return None
        ids = np.unique(ids)
        ids, length = ids[~self.store.known[ids]], self._enrolls
        total, cut, sent = None, Cut(length, self._engine.settings.chunk), []
        for first in range(0, len(ids), length):
            group = ids[first : first + length]
            everyone = np.concatenate([group, np.full(length - len(group), group[0])])
            present = cut.arrange(np.arange(length) < len(group), False)
            train, starts = self._load_rows("train", everyone, length)
            places = (
                cut.arrange(everyone, group[0]),
                cut.arrange(starts, starts.flat[0]),
            )
            joining = self._members(*places, None, present, self._weights.enrollment)
            part, (states, joins) = self._engine.enroll(joining, train, cut)
            there = pad_slots(np.flatnonzero(present), length, 0)
            self.store.write(group, extract(states, there))
            if jax.tree.leaves(joins):
                own = trees.take(joins, np.flatnonzero(present))
                sent.append(jax.device_put(own, jax.local_devices()[0]))
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total if total is None or not sent else self._middle(total, sent)

    def _middle(self, total: RunningSum, sent: list[PyTree]) -> RunningSum:
        """The sum whose mean is what the run's reduction makes of all that was sent."""
        middle = self._engine.settings.reduction.stacked
        assert middle is not None
        joins = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sent)
        reduced = partial(replace_mean, middle=middle)
        if self._replicas is not None:
            reduced = jax.vmap(reduced, in_axes=(0, 1))
        return jax.jit(reduced)(total, joins)

    def states(self, ids: np.ndarray) -> PyTree:
        """What these clients remember, stacked."""
        self.enroll(ids)
        states = jax.device_put(self.store.gather(ids), jax.local_devices()[0])
        if self._places is None:
            return states
        return jax.tree.map(lambda leaf: leaf[:, self._places], states)

    def shard(self, client: int) -> Shard:
        """The training rows of one client."""
        train, starts = self._load_rows("train", np.array([client]), 1)
        start, count, id = (
            jnp.asarray(number, jnp.int32)
            for number in (starts[..., 0], self.train.counts[client], client)
        )
        return Shard(train, start, count, id, self.train.capacity)

    def _load_rows(self, name: str, ids: np.ndarray, most: int) -> Packed:
        """Rows of a group of clients, and where theirs start."""
        split, most = self._splits[name], min(most, self.number)
        starts, counts = split.starts[..., ids], split.counts[ids]
        examples, starts = self._rows.load(name, starts, counts, most)
        if self._places is not None and starts.ndim > 1:
            starts = starts[self._places]
        return examples, starts

    def load_measured(
        self, ids: np.ndarray, splits: Iterable[str] = ()
    ) -> tuple[PyTree, Members, dict[str, PyTree], Places]:
        """States of clients to measure, and their rows, and where these start."""
        loaded = {
            name: self._load_rows(name, ids, len(ids)) for name in {"train", *splits}
        }
        members = self._members(ids, loaded["train"][1])
        places = {
            name: (loaded[name][1], self._splits[name].counts[ids]) for name in splits
        }
        places = jax.tree.map(lambda leaf: leaf.astype(np.int32), places)
        examples = {name: rows for name, (rows, _) in loaded.items()}
        return self.states(ids), members, examples, jax.device_put(places)

    def most_to_measure(self, splits: Iterable[str]) -> int:
        """Clients to measure in one call: what has to be brought of them is modest."""
        brought = bytes_of(self._template)
        if self._rows.kind == "host":
            used = [self._splits[name] for name in {"train", *splits}]
            brought += sum(split.capacity * _row_bytes(split) for split in used)
        return max(AT_ONCE_BYTES // max(brought, 1), 1)

    def plan(self, ids: np.ndarray) -> Plan:
        """Begin to bring what a block of these cohorts needs."""
        present = ids != NOBODY
        ids = np.where(present, ids, max(ids.max(), 0))
        self.store.stage(ids)
        starts = self.train.starts
        if starts.ndim == 2:  # a replica of its own for each split
            starts = starts[np.arange(len(starts))[:, None, None], ids]
        else:
            starts = starts[ids]
        asked = "train", starts, self.train.counts[ids], self._room
        train = partial(self._rows.load, *asked)
        if self._rows.kind == "host":
            train = self._packing.submit(train).result
        members = self._block_members(ids, present, starts) if self.stay else None
        return Plan(ids, present, train, members)

    def load(self, plan: Plan) -> tuple[Members, PyTree, PyTree]:
        """Members, states and rows of a block."""
        self.store.reserve(plan.ids)
        self.enroll(plan.ids)
        train, starts = plan.train()
        members = plan.members
        if members is None:
            members = self._block_members(plan.ids, plan.present, starts)
        return members, self.store.buffer, train

    def _block_members(
        self, ids: np.ndarray, present: np.ndarray, starts: np.ndarray
    ) -> Members:
        """Members of a block, on their devices; their cohorts are cut."""
        # No device has the slots of padding.
        nobody = np.iinfo(np.int32).max
        slots = np.where(present, self.store.slots(ids), nobody).astype(np.int32)
        arrays = (
            self.cut.arrange(ids, 0),
            self.cut.arrange(starts, 0),
            self.cut.arrange(slots, nobody),
            self.cut.arrange(present, False),
        )
        if self._engine.keys is None:
            arrays = tuple(array[0] for array in arrays)
        lie = devices.sharding(self._engine.mesh, self._engine.keys, 1)
        return jax.device_put(self._members(*arrays), lie)


def _row_bytes(split: Shards) -> int:
    return bytes_of(split.examples) // max(len(jax.tree.leaves(split.examples)[0]), 1)

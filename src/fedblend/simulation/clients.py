# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The clients of a simulation: where their rows lie, what they weigh, their states.

Clients are enrolled when they are first needed, all at once where the server waits for
what enrollment sends, or where states live on the device.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import PyTree
from fedblend.data.federated import Shards
from fedblend.simulation.aggregators import RunningSum, empty
from fedblend.simulation.client_store import open_store
from fedblend.simulation.engine import Engine
from fedblend.simulation.rounds import Members

ENROLL_AT_ONCE = 1024
"""Clients enrolled in one call; bounds the memory it takes."""


class Weights(NamedTuple):
    """What each client weighs when all of them enroll, and in a round."""

    enrollment: np.ndarray
    rounds: np.ndarray


class Clients:
    """Rows, weights and states of all clients.

    Args:
        engine: the compiled functions.
        train: the clients' training rows.
        weights: the clients' weights.
        replicas: those of the run.
        per_block: clients of a block of rounds, in one replica.
        store: the kind of store for states.
        folder: where a store on disk has its files.
    """

    def __init__(
        self,
        engine: Engine,
        train: Shards,
        weights: Weights,
        *,
        replicas: int | None,
        per_block: int,
        store: str,
        folder: Path | None,
    ):
        self.train = train
        self._engine, self._weights, self._replicas = engine, weights, replicas
        self.number = len(train.counts)
        first = self.members(np.zeros(1, int))
        first = first._replace(starts=first.starts.reshape(-1))
        self.shapes = engine.shapes(trees.take(first, 0))
        template = self.with_replicas(self.shapes.state)
        self.store = open_store(store, template, self.number, folder)
        self._room = min(ENROLL_AT_ONCE, self.number)
        if not self.store.eager and not self.joins:
            self._room = min(self._room, per_block * (replicas or 1))

    @property
    def joins(self) -> bool:
        """Whether enrollment sends anything to the server."""
        return bool(jax.tree.leaves(self.shapes.join))

    def with_replicas(self, shapes: PyTree) -> PyTree:
        """Shapes of one replica as they are in this run."""
        ahead = () if self._replicas is None else (self._replicas,)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(ahead + leaf.shape, leaf.dtype), shapes
        )

    def members(
        self,
        ids: np.ndarray,
        slots: np.ndarray | None = None,
        present: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> Members:
        """Arrays over these clients, as the compiled functions take them."""
        starts = self.train.starts
        if starts.ndim == 2 and ids.ndim == 3:  # a replica of its own for each split
            starts = starts[np.arange(len(starts))[:, None, None], ids]
        else:
            starts = starts[..., ids]
        present = np.ones(ids.shape, bool) if present is None else present
        weights = self._weights.rounds if weights is None else weights
        return Members(
            ids=jnp.asarray(ids, jnp.int32),
            slots=jnp.asarray(ids if slots is None else slots, jnp.int32),
            starts=jnp.asarray(starts, jnp.int32),
            counts=jnp.asarray(self.train.counts[ids], jnp.int32),
            weights=jnp.asarray(weights[ids] * present, float),
            present=jnp.asarray(present),
        )

    def enroll_first(self) -> RunningSum:
        """Enroll whom the server waits for; the sum of what they send."""
        everybody = np.arange(self.number)
        joined = self.enroll(everybody) if self.joins or self.store.eager else None
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
        ids, room = ids[~self.store.known[ids]], self._room
        total = None
        for first in range(0, len(ids), room):
            group = ids[first : first + room]
            padded = np.concatenate([group, np.full(room - len(group), group[0])])
            present = np.arange(room) < len(group)
            joining = self.members(padded, None, present, self._weights.enrollment)
            part, states = self._engine.enroll(joining)
            # Sliced on the host: on the device every new length would be compiled.
            rows = trees.take(jax.device_get(states), slice(len(group)))
            self.store.write(group, rows)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    def states(self, ids: np.ndarray) -> PyTree:
        """What these clients remember, stacked."""
        self.enroll(ids)
        return self.store.gather(ids)

    def load(self, ids: np.ndarray, chunk: int) -> tuple[Members, PyTree]:
        """Members and states of a block's cohorts, which fill whole chunks."""
        self.enroll(ids)
        states, slots = self.store.load(ids, min(self.number, ids.size))
        gap = [(0, 0), (0, 0), (0, -ids.shape[-1] % chunk)]
        present = np.pad(np.ones(ids.shape, bool), gap)
        slots = np.pad(slots, gap, constant_values=self.number)
        return self.members(np.pad(ids, gap), slots, present), states

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Where client states live in a run of several processes: on all their devices.

The state of client i is on a device of process i mod P. Every process calls every
method, with the same arguments, and gets the same answers; only states that stay on
devices differ.
"""

from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.errors import UserError
from fedblend.simulation import devices
from fedblend.simulation.stores.device_store import extract, insert, padded

if TYPE_CHECKING:
    from fedblend.simulation.engine import Engine


class SharedStore:
    """All states on the devices of all processes; a block sees all of them."""

    kind, eager = "device", True

    def __init__(self, kind: str, template: PyTree, clients: int, engine: "Engine"):
        if kind not in ("auto", "device"):
            allowed = "auto or device, where several processes share a run"
            raise UserError("store", kind, allowed)
        self.known = np.zeros(clients, bool)
        number, lie = engine.slots.number(clients), cast(Any, engine.slots.sharding)
        whole = devices.sharding(engine.mesh, None, None)
        # Replicas that processes have to themselves leave them nothing to share.
        self._apart = jax.process_count()
        if engine.width % self._apart:
            self._apart = 1
        self._part = number // self._apart
        self.states = jax.tree.map(
            lambda leaf: _zeros((number, *leaf.shape), leaf.dtype, lie), template
        )
        self._take = jax.jit(extract, out_shardings=whole)
        self._put = jax.jit(insert, out_shardings=lie, donate_argnums=0)

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Where the states of these clients are."""
        return ids % self._apart * self._part + ids // self._apart

    def stage(self, ids: np.ndarray, room: int) -> None:
        """Nothing needs to be brought."""

    def reserve(self, ids: np.ndarray, room: int) -> None:
        """Every state has its slot."""

    def load(self, ids: np.ndarray, room: int) -> tuple[PyTree, np.ndarray]:
        """The states a block needs, and the slot of each id."""
        del room
        return self.states, self.slots(ids)

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Take back what ``load`` gave."""
        del ids
        self.states = states

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, stacked."""
        return devices.local(self._take(self.states, self.slots(ids)))

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients, which are the first ones of ``states``."""
        self.known[ids] = True
        for leaf in jax.tree.leaves(states)[:1]:
            slots = padded(self.slots(ids), len(leaf), self._apart * self._part)
            self.states = self._put(self.states, slots, states)

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold: that of a device store of one process."""
        everybody = np.arange(len(self.known))
        return {"states": self.gather(everybody), "known": self.known}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot."""
        del changed
        number = len(self.known)
        states = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape[1:]), leaf.dtype),
            self.states,
        )
        return {"states": states, "known": self.known}

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        rows = jax.tree.map(np.asarray, snapshot["states"])
        self.write(np.arange(len(self.known)), rows)
        self.known = np.array(snapshot["known"])


def _zeros(shape: tuple[int, ...], dtype, lie: jax.sharding.Sharding) -> jax.Array:
    def part(index):
        return np.zeros(np.broadcast_to(0, shape)[index].shape, dtype)

    return jax.make_array_from_callback(shape, lie, part)

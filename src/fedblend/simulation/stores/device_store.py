# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""All client states on the device, and how rows get into and out of its buffers.

A buffer is given up to the function that changes it, so that it is there only once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import PyTree
from fedblend.simulation.devices import as_bits, from_bits


class Slots(NamedTuple):
    """How the slots of a buffer lie on devices: ``width`` of them have as many each."""

    width: int = 1
    sharding: jax.sharding.Sharding | None = None

    def number(self, least: int) -> int:
        """So many slots at least, evenly shared."""
        return least + -least % self.width

    def zeros(self, template: PyTree, least: int) -> PyTree:
        """A buffer of so many states like ``template``, at least."""
        rows = self.number(least)

        def zeros():
            return jax.tree.map(
                lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), template
            )

        # One program, and not one for each shape.
        return jax.jit(zeros, out_shardings=self.sharding)()


ONE_DEVICE = Slots()


@partial(jax.jit, donate_argnums=0)
def insert(buffer: PyTree, slots: jax.Array, rows: PyTree) -> PyTree:
    """The buffer, which is given up, with rows at these slots; beyond its end: none."""
    return jax.tree.map(
        lambda all, new: all.at[slots].set(new, mode="drop"), buffer, rows
    )


@jax.jit
def extract(buffer: PyTree, slots: jax.Array) -> PyTree:
    """The rows at these slots.

    Those of other devices come as sums with zeros: of whole numbers, which keep -0.
    """
    return jax.tree.map(
        lambda leaf: from_bits(as_bits(leaf)[slots], leaf.dtype), buffer
    )


def padded(slots: np.ndarray, length: int, beyond: int) -> np.ndarray:
    """Slots filled up to a length with one beyond the end of the buffer.

    >>> padded(np.array([4, 2]), 4, 9)
    array([4, 2, 9, 9], dtype=int32)
    """
    full = np.full(length, beyond, np.int32)
    full[: len(slots)] = slots
    return full


class DeviceStore:
    """All states on the device; a block sees all of them."""

    kind, eager = "device", True

    def __init__(self, template: PyTree, clients: int, slots: Slots = ONE_DEVICE):
        self.states = slots.zeros(template, clients)
        self.known = np.zeros(clients, bool)
        self._template, self._slots = template, slots

    def stage(self, ids: np.ndarray, room: int) -> None:
        """Nothing needs to be brought."""

    def reserve(self, ids: np.ndarray, room: int) -> None:
        """Every state has its slot."""

    def load(self, ids: np.ndarray, room: int) -> tuple[PyTree, np.ndarray]:
        """The states a block needs, and the slot of each id."""
        del room
        return self.states, self.slots(ids)

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Where the states of these clients are."""
        return ids

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Take back what ``load`` gave."""
        del ids
        self.states = states

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, stacked."""
        return extract(self.states, np.asarray(ids, np.int32))

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients, which are the first ones of ``states``."""
        self.known[ids] = True
        for leaf in jax.tree.leaves(states)[:1]:
            slots = padded(ids, len(leaf), self._slots.number(len(self.known)))
            self.states = insert(self.states, slots, states)

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold: no slots that only make devices even."""
        clients = len(self.known)
        states = self.states
        if self._slots.number(clients) > clients:
            states = trees.take(states, slice(clients))
        return {"states": states, "known": self.known}

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        del changed
        return self.snapshot()

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        self.known = np.array(snapshot["known"])
        self.states = self._slots.zeros(self._template, len(self.known))
        everybody = np.arange(len(self.known), dtype=np.int32)
        self.states = insert(self.states, everybody, snapshot["states"])

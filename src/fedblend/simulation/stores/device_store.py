# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""All client states on the device, and how rows get into and out of its buffers.

A buffer is given up to the function that changes it, so that it is there only once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import PyTree
from fedblend.simulation.devices import decode_bits, encode_bits


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
        lambda leaf: decode_bits(encode_bits(leaf)[slots], leaf.dtype), buffer
    )


def pad_slots(slots: np.ndarray, length: int, beyond: int) -> np.ndarray:
    """Slots filled up to a length with one beyond the end of the buffer.

    >>> pad_slots(np.array([4, 2]), 4, 9)
    array([4, 2, 9, 9], dtype=int32)
    """
    full = np.full(length, beyond, np.int32)
    full[: len(slots)] = slots
    return full


class Store:
    """The states of all clients: what stores have in common.

    ``buffer`` is what a block of rounds runs on, and ``known`` says who is enrolled.

    Args:
        template: the state of a client, with the replicas of a sweep in front.
        clients: how many there are.
        slots: how the buffer lies on devices.
    """

    kind: str
    eager = False
    """Whether all clients are enrolled before the first round."""

    def __init__(self, template: PyTree, clients: int, slots: Slots):
        self._template, self._slots = template, slots
        self.known = np.zeros(clients, bool)
        self.buffer: Any = None

    def stage(self, ids: np.ndarray) -> None:
        """Begin to bring the states that a block of these clients will need."""

    def reserve(self, ids: np.ndarray) -> None:
        """Give all of these clients a slot; the states of the known follow."""

    def save(self, ids: np.ndarray, states: PyTree) -> None:
        """Take back the buffer, after a block of these clients."""
        del ids
        self.buffer = states

    def template(self, changed: int) -> PyTree:
        """The shapes of a snapshot, given how many clients the last block changed."""
        del changed
        states = trees.shapes(self._template, len(self.known))
        return {"states": states, "known": self.known}


class DeviceStore(Store):
    """All states on the devices; a block sees all of them."""

    kind, eager = "device", True

    def __init__(self, template: PyTree, clients: int, slots: Slots = ONE_DEVICE):
        super().__init__(template, clients, slots)
        self.buffer = slots.zeros(template, clients)

    def slots(self, ids: np.ndarray) -> np.ndarray:
        """Where the states of these clients are."""
        return np.asarray(ids)

    def gather(self, ids: np.ndarray) -> PyTree:
        """The states of these clients, stacked."""
        return extract(self.buffer, np.asarray(ids, np.int32))

    def write(self, ids: np.ndarray, states: PyTree) -> None:
        """Set the states of these clients, which are the first ones of ``states``."""
        self.known[ids] = True
        for leaf in jax.tree.leaves(states)[:1]:
            beyond = self._slots.number(len(self.known))
            slots = pad_slots(np.asarray(ids), len(leaf), beyond)
            self.buffer = insert(self.buffer, slots, states)

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold, by client: no slots that only fill devices."""
        clients, states = len(self.known), self.buffer
        if self._slots.number(clients) > clients:
            states = trees.take(states, slice(clients))
        return {"states": states, "known": self.known}

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        everybody = np.arange(len(self.known))
        self.buffer = self._slots.zeros(self._template, len(everybody))
        self.write(everybody, jax.tree.map(np.asarray, snapshot["states"]))
        self.known = np.array(snapshot["known"])

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How a cohort is cut: into chunks of clients, and groups of consecutive chunks.

Clients of a chunk are trained side by side, chunks of a group are summed one after
another, and the sums of groups are added by a binary tree. None of it depends on how
many devices there are: a device takes over whole groups.
"""

from typing import NamedTuple

import jax
import numpy as np

from fedblend.simulation.aggregators import GROUPS, group_edges

CPU_CHUNK, CPU_ENTRIES = 8, 2**19
"""Clients trained side by side on a CPU: at most so many, while their parameters
together have no more entries than that; docs/benchmarks.md has the measurement."""
CHUNK_COST = 0.5
"""What a chunk costs besides its clients, in clients of a small model."""


class Cut(NamedTuple):
    """``clients`` in chunks of ``chunk``, the last one padded."""

    clients: int
    chunk: int

    @property
    def edges(self) -> np.ndarray:
        """The first chunk of each group, and the end of the last group."""
        return group_edges(-(-self.clients // self.chunk))

    @property
    def groups(self) -> int:
        """The number of groups, a power of two."""
        return len(self.edges) - 1

    @property
    def turns(self) -> np.ndarray:
        """The number of chunks of each group."""
        return np.diff(self.edges).astype(np.int32)

    def arrange(self, values: np.ndarray, padding) -> np.ndarray:
        """Values over clients as [..., groups, chunks of a group, chunk]."""
        number = np.arange(self.turns.max())
        real = number < self.turns[:, None]
        first = np.where(real, self.edges[:-1, None] + number, self.edges[-1])
        places = first[..., None] * self.chunk + np.arange(self.chunk)
        after = np.full((*values.shape[:-1], 1), padding, values.dtype)
        values = np.concatenate([values, after], axis=-1)
        return values[..., np.minimum(places, self.clients)]


def chunk_size(given: int | None, cohort: int, entries: int, devices: int) -> int:
    """How many clients to train side by side.

    On a CPU the number of devices does not matter, so that a run has the same bits on
    any: the size is the one that takes least of the time of one, two, four and eight
    devices together.

    Args:
        given: what the user asks for, at most.
        cohort: clients of a round.
        entries: of one client's parameters, in all replicas.
        devices: that share a cohort.
    """
    if given is None and jax.default_backend() != "cpu":
        given = -(-cohort // devices)
    if given is not None:
        return _even(cohort, -(-cohort // min(given, cohort)))
    most = min(max(CPU_ENTRIES // max(entries, 1), 1), CPU_CHUNK)
    sizes = range(min(most, cohort), 0, -1)
    return min(sizes, key=lambda chunk: _device_time(Cut(cohort, chunk)))


def _device_time(cut: Cut) -> float:
    """The time of 1, 2, 4 and 8 devices that share a cohort, idle or not."""
    widths = 2 ** np.arange(GROUPS.bit_length())
    turns = [
        cut.turns.reshape(min(width, cut.groups), -1).sum(axis=1).max()
        for width in widths
    ]
    return (cut.chunk + CHUNK_COST) * float(widths @ turns)


def _even(cohort: int, pieces: int) -> int:
    return -(-cohort // pieces)

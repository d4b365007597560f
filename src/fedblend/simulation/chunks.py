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

from fedblend.simulation.aggregators import group_edges

CPU_CHUNK, CPU_ENTRIES = 20, 2**20
"""Clients trained side by side on a CPU: so many, while their parameters together have
no more entries than that; docs/benchmarks.md has the measurement."""
WASTE = 0.1
"""Part of a cohort that padding may add, so that devices have even shares of it."""


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
    any. Chunks are as large as they may be; the smallest number of pieces that eight,
    or at least four or two, devices can share evenly is preferred.

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
    least = -(-cohort // min(most, cohort))
    for pieces in (-(-least // 8) * 8, 4, 2):
        chunk = _even(cohort, pieces)
        if pieces >= least and pieces * chunk <= (1 + WASTE) * cohort:
            return chunk
    return _even(cohort, least)


def _even(cohort: int, pieces: int) -> int:
    return -(-cohort // pieces)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The books of a simulation: who was heard, and what each client sent and received.

Bits are those of the leaves that would travel, counted from the messages themselves
and summed in 64-bit integers on the host. Every member of a cohort receives the
message, also one that then drops out; an up counts where it was sent, also if it was
rejected. A client that joins receives the initial parameters if its enrollment makes
anything of them; what enrollment says counts before the first round.
"""

from typing import NamedTuple

import numpy as np

from fedblend.core import PyTree
from fedblend.simulation.aggregators import DROPPED, HEARD, PADDING, REJECTED


class Sizes(NamedTuple):
    """Bits of each kind of message, without ragged parts."""

    up: int
    down: int
    join: int
    params: int


class Totals(NamedTuple):
    """What happened to the members of a block's cohorts."""

    heard: int
    dropped: int
    rejected: int


class CommunicationLog:
    """Counts of one replica, by client."""

    def __init__(self, clients: int, sizes: Sizes):
        self.sizes = sizes
        self.up = np.zeros(clients, np.int64)
        self.down = np.zeros(clients, np.int64)
        self.joined = np.zeros(clients, bool)

    def join(self, ids: np.ndarray) -> None:
        """Count the enrollment of those who have not joined yet."""
        newcomers = np.unique(ids)
        newcomers = newcomers[~self.joined[newcomers]]
        self.joined[newcomers] = True
        self.down[newcomers] += self.sizes.params
        self.up[newcomers] += self.sizes.join

    def enter(self, ids: np.ndarray, status: np.ndarray, up_bits, down_bits) -> Totals:
        """Count the rounds of a block; all arguments are arrays over its members."""
        real, sent = status != PADDING, (status == HEARD) | (status == REJECTED)
        self.join(ids[real])
        ragged_up = 0 if up_bits is None else np.asarray(up_bits, np.int64)
        ragged_down = 0 if down_bits is None else np.asarray(down_bits, np.int64)
        np.add.at(
            self.up, ids[sent], np.where(sent, self.sizes.up + ragged_up, 0)[sent]
        )
        received = np.where(real, self.sizes.down + ragged_down, 0)
        np.add.at(self.down, ids[real], received[real])
        return Totals(*(int((status == s).sum()) for s in (HEARD, DROPPED, REJECTED)))

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold."""
        return {"up": self.up, "down": self.down, "joined": self.joined}

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        self.up, self.down, self.joined = (
            np.array(snapshot[name]) for name in ("up", "down", "joined")
        )

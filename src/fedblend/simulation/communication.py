# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Counting what rounds cost: whose answers arrived, each client's bits and operations.

Bits are those of the leaves that would travel, counted from the messages themselves
and summed in 64-bit integers on the host. Every member of a cohort receives the
message, also one that then drops out; an up counts where it was sent, also if it was
rejected. A client that joins receives the initial parameters if its enrollment makes
anything of them; what enrollment sends counts before the first round.
"""

from typing import NamedTuple

import jax
import numpy as np

from fedblend.core import PyTree, static_bits
from fedblend.simulation.aggregators import (
    DROPPED,
    PADDING,
    RECEIVED,
    REJECTED,
)
from fedblend.simulation.rounds import Shapes


class Sizes(NamedTuple):
    """Bits of each kind of message, without ragged parts."""

    up: int
    down: int
    join: int
    params: int


def sizes_of(shapes: Shapes) -> Sizes:
    """The bits of messages of these shapes."""
    silent = not jax.tree.leaves(shapes.message.shared)
    enrolls = bool(jax.tree.leaves((shapes.join, shapes.state))) and not silent
    return Sizes(
        up=static_bits(shapes.up),
        # The number of the round is the runtime's own and not counted.
        down=static_bits(shapes.message._replace(round=None)),
        join=static_bits(shapes.join),
        params=static_bits(shapes.params) if enrolls else 0,
    )


class Totals(NamedTuple):
    """What happened to the members of a block's cohorts."""

    received: int
    dropped: int
    rejected: int


def first_rejected(ids: np.ndarray, status: np.ndarray) -> list[tuple[int, int]]:
    """Round (from 0) and client of a block's first answer that is not finite, if any.

    Arguments are arrays over the block's rounds and members.
    """
    places = np.argwhere(np.asarray(status) == REJECTED)[:1]
    return [(int(place[0]), int(ids[tuple(place)])) for place in places]


class CommunicationLog:
    """Bits of one replica, by client and in total."""

    def __init__(self, clients: int, sizes: Sizes):
        self.sizes = sizes
        self.up = np.zeros(clients, np.int64)
        self.down = np.zeros(clients, np.int64)
        self.joined = np.zeros(clients, bool)

    def join(self, ids: np.ndarray) -> None:
        """Count the enrollment of those who have not joined yet."""
        new = np.unique(ids)
        new = new[~self.joined[new]]
        self.joined[new] = True
        self.down[new] += self.sizes.params
        self.up[new] += self.sizes.join

    def enter(
        self,
        ids: np.ndarray,
        status: np.ndarray,
        up_bits: np.ndarray | None,
        down_bits: np.ndarray | None,
    ) -> Totals:
        """Count the rounds of a block; all arguments are arrays over its members."""
        real, sent = status != PADDING, (status == RECEIVED) | (status == REJECTED)
        self.join(ids[real])
        ragged_up = 0 if up_bits is None else np.asarray(up_bits, np.int64)
        ragged_down = 0 if down_bits is None else np.asarray(down_bits, np.int64)
        up = np.where(sent, self.sizes.up + ragged_up, 0)
        np.add.at(self.up, ids[sent], up[sent])
        down = np.where(real, self.sizes.down + ragged_down, 0)
        np.add.at(self.down, ids[real], down[real])
        kinds = (RECEIVED, DROPPED, REJECTED)
        return Totals(*(int((status == kind).sum()) for kind in kinds))

    def snapshot(self) -> PyTree:
        """What a checkpoint has to hold."""
        return {"up": self.up, "down": self.down, "joined": self.joined}

    def restore(self, snapshot: PyTree) -> None:
        """Go back to a snapshot."""
        self.up, self.down, self.joined = (
            np.array(snapshot[name]) for name in ("up", "down", "joined")
        )

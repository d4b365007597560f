# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How the server collects a secure sum: of single clients it sees masked answers only.

Checks of single answers, finite numbers and norms, are left to the nodes: each clips
its own numbers and sends zeros in the place of what is not finite.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedblend import trees
from fedblend.errors import ConfigError
from fedblend.simulation.aggregators import RunningSum
from fedblend.simulation.communication import Sizes
from fedblend_federation.message import ENROLLED, UNKNOWN, Message
from fedblend_federation.secure.fixed_point import FixedPoint
from fedblend_federation.secure.summand import Summand, as_tree_like, refusal
from fedblend_federation.secure.sums import SecureSum, Summed, Summing
from fedblend_federation.server.aggregation import Total
from fedblend_federation.server.collection import (
    Collected,
    Collection,
    PlainCollection,
    Requests,
    all_must_join,
    too_few,
)
from fedblend_federation.transport import Replies

if TYPE_CHECKING:
    from fedblend_federation.server.coordinator import Coordinator


def collection_of(server: "Coordinator", sizes: Sizes) -> Collection:
    """How a server collects sums, as it was set up."""
    secure = server.setup.secure is not None
    return SecureCollection(server, sizes) if secure else PlainCollection(server, sizes)


class SecureCollection:
    """Sums without seeing what is summed."""

    join = ()

    def __init__(self, server: "Coordinator", sizes: Sizes):
        secure, setup = server.setup.secure, server.setup
        assert secure is not None
        reason = refusal(
            server.algorithm, server.shapes.up, server.request, server.shapes.down
        )
        if reason is not None:
            raise ConfigError(reason)
        self._server, self._secure = server, secure
        self._summand = Summand(server.algorithm, server.shapes.up, server.shapes.down)
        self._join_size = trees.size(server.shapes.join)
        self.sizes = sizes._replace(
            up=secure.bits * self._summand.size, join=secure.bits * self._join_size
        )
        largest = float(server.weights.max())
        self._summing = Summing(
            *(server.exchanges, secure.folder, setup.experiment, setup.names),
            *(largest, {}),
        )

    def joins(self, enrolled: Replies) -> RunningSum:
        """The sum of what all active clients send after enrollment."""
        server, active = self._server, self._server.active.tolist()
        if len(enrolled.accepted) < len(active):
            raise all_must_join(enrolled, server.setup.names)
        head = Message("join", server.setup.experiment, UNKNOWN, ENROLLED)
        requests = {client: (head._replace(client=client), ()) for client in active}
        summed = self._sum("enrollment", requests, self._join_size, len(active))
        total = as_tree_like(self._values(summed), server.shapes.join)
        return self._running("joins", total, summed)

    def updates(
        self, members: np.ndarray, requests: Requests, others: Replies
    ) -> Collected:
        """The sum of the updates of those members who have requests."""
        server = self._server
        if len(requests) < server.quorum:
            raise too_few(server, len(requests), others)
        what, size = f"round {server.round}", self._summand.size
        summed = self._sum(what, requests, size, server.quorum, self._following())
        values = self._values(summed)
        total = self._summand.total(values, server.down)
        found = Total(self._running("updates", total, summed))
        return Collected(found, summed.replies, {})

    def _sum(
        self,
        what: str,
        requests: Requests,
        size: int,
        quorum: int,
        following: Sequence[int] = (),
    ) -> Summed:
        empty = np.zeros(size, self._encoding(len(requests)).dtype)
        return SecureSum(self._summing, what, requests).open(empty, quorum, following)

    def _following(self) -> list[int]:
        """The members of the next round, as far as they are enrolled."""
        server, number = self._server, self._server.round + 1
        if number >= server.rounds:
            return []
        members = np.sort(server.cohort(number))
        return members[server.bases[members] != UNKNOWN].tolist()

    def _encoding(self, members: int) -> FixedPoint:
        return FixedPoint(self._secure.bits, self._secure.clip, members)

    def _values(self, summed: Summed) -> np.ndarray:
        """The weighted sum of the clients' numbers."""
        decoded = self._encoding(len(summed.members)).decode(summed.total)
        return decoded * self._summing.largest

    def _running(self, what: str, total: trees.PyTree, summed: Summed) -> RunningSum:
        weight = float(self._server.weights[summed.answered].sum())
        count = len(summed.answered)
        return self._server.aggregator.total_of(what, total, weight, count)

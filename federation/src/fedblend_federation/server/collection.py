# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How the server collects the sum of a round's answers: it sees each of them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.core import PyTree, Sender
from fedblend.simulation.aggregators import RunningSum
from fedblend.simulation.communication import Sizes
from fedblend_federation.message import Message, payload_of
from fedblend_federation.server.aggregation import NormHistory, Total, reasons
from fedblend_federation.server.settings import BelowQuorum
from fedblend_federation.transport import Replies

if TYPE_CHECKING:
    from fedblend_federation.server.coordinator import Coordinator

Requests = Mapping[int, tuple[Message, PyTree]]
"""Head and payload of each client's request."""


class Collected(NamedTuple):
    """The sum of a round, and what became of its members."""

    total: Total
    replies: Replies
    asks: Mapping[int, PyTree]
    """What clients ask for from now on, of those who changed it."""


class Collection(Protocol):
    """Collects sums of answers."""

    join: PyTree
    """Shapes of what arrives with enrollment."""
    sizes: Sizes
    """Bits of each kind of message."""

    def joins(self, enrolled: Replies) -> RunningSum:
        """The sum of what all active clients send at enrollment."""
        ...

    def updates(
        self, members: np.ndarray, requests: Requests, others: Replies
    ) -> Collected:
        """The sum of the updates of those members who have requests.

        ``others`` has what became of the enrollment of the others.

        Raises:
            BelowQuorum: too few replied; nothing has changed.
        """
        ...


class PlainCollection:
    """Checks and sums the answers of single clients."""

    def __init__(self, server: "Coordinator", sizes: Sizes):
        self._server, self.join, self.sizes = server, server.shapes.join, sizes

    def joins(self, enrolled: Replies) -> RunningSum:
        """The sum of the joins in replies to enrollment."""
        server = self._server
        norms = {client: found[2] for client, found in enrolled.accepted.items()}
        self._reject(enrolled, NormHistory(server.rules.norm_ratio).settle(norms))
        members = np.array(sorted(enrolled.accepted), int)
        if len(members) < len(server.active):
            raise all_must_join(enrolled, server.setup.names)
        joins = [enrolled.accepted[client][0] for client in members.tolist()]
        return server.aggregator.sum_joins(joins, server.weights[members])

    def updates(
        self, members: np.ndarray, requests: Requests, others: Replies
    ) -> Collected:
        """The sum of the updates of those members who have requests."""
        server, rules = self._server, self._server.rules
        replies = server.exchanges.exchange(
            requests, self._accept, enough=rules.cohort, least=rules.least
        )
        history = server.norm_history
        before = list(history.norms)
        norms = {client: found[2] for client, found in replies.accepted.items()}
        self._reject(replies, history.settle(norms))
        counted = sorted(replies.accepted)
        if len(counted) < rules.least:
            history.norms = before
            raise too_few(server, len(counted), replies, others)
        places = {client: int(np.searchsorted(members, client)) for client in counted}
        ups = {places[client]: replies.accepted[client][0] for client in counted}
        norms, factors = {client: norms[client] for client in counted}, {}
        for client, most in history.bounds(norms).items():
            factors[places[client]] = most / norms[client][0]
            about = {"round": server.round, "norm": norms[client][0], "counted": most}
            server.exchanges.note_of(client, "clipped", **about)
        senders = {places[client]: self._sender(client) for client in counted}
        total = server.aggregator.sum_updates(
            ups, senders, server.weights[counted], len(members), factors
        )
        found = {client: replies.accepted[client][1] for client in counted}
        asks = {client: asked for client, asked in found.items() if asked is not None}
        return Collected(total, replies, asks)

    def _sender(self, client: int) -> Sender:
        """Who sent an answer of this round."""
        server = self._server
        key = keys.at(server.engine.key, "client", server.round, client)
        return Sender(jnp.asarray(client, jnp.int32), key, server.down)

    def _reject(self, replies: Replies, refused: Mapping[int, str]) -> None:
        """Reject replies that were accepted one by one."""
        for client, why in refused.items():
            del replies.accepted[client]
            replies.rejected[client] = why
            self._server.exchanges.note_of(client, "rejected", reason=why)

    def _accept(self, reply: Message) -> tuple[Any, Any, tuple[float, ...]]:
        """A client's update, its request if that has changed, and its norms."""
        server, asks = self._server, reply.fields.get("asked") is True
        template = (server.shapes.up, server.request if asks else ())
        up, request = jax.tree.map(jnp.asarray, payload_of(reply, template))
        norms = server.aggregator.check_update(up, request, self._sender(reply.client))
        server.norm_history.check(norms)
        return up, request if asks else None, norms


def all_must_join(enrolled: Replies, names: Mapping[int, str]) -> BelowQuorum:
    """The error where an algorithm cannot start without all clients."""
    return BelowQuorum(
        "enrollment: all clients must reply before the first round; "
        + reasons(enrolled, names=names)
    )


def too_few(server: "Coordinator", counted: int, *replies: Replies) -> BelowQuorum:
    """The error where a round has too few answers."""
    why = reasons(*replies, names=server.setup.names)
    return BelowQuorum(
        f"round {server.round}: {counted} of {server.rules.cohort} clients replied, "
        f"the quorum is {server.quorum}; {why}"
    )

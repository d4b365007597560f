# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's exchanges with its clients, in its audit, and sums of their answers.

In a sum without masks the server sees each answer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.core import PyTree, Sender
from fedblend.simulation.aggregators import RunningSum
from fedblend.simulation.communication import Sizes
from fedblend_federation.message import UNKNOWN, Message, one_line, payload_of
from fedblend_federation.server.aggregation import NormHistory, Total, reasons
from fedblend_federation.server.settings import BelowQuorum, RoundRules
from fedblend_federation.transport import Replies, Requests, Timeouts, exchange

if TYPE_CHECKING:
    from fedblend_federation.server.coordinator import Coordinator
    from fedblend_federation.server.membership import Membership

STOP_DEADLINE = 20.0
"""Seconds for which the server waits until clients have heard that it stops."""
HEADS_PER_LINE = 40
"""Hashes of clients' audits in a line of the server's own."""
MAX_STRAYS = 1000
"""Different descriptions of stray replies that are kept: other machines choose them."""


class AuditedExchange:
    """Sends requests and collects replies; ``strays`` counts replies to no request."""

    def __init__(
        self,
        peers: "Membership",
        rules: RoundRules,
        note: Callable[..., Any],
        names: Mapping[int, str],
    ):
        self._peers, self._rules = peers, rules
        self._note, self._names = note, names
        self.strays: Counter[str] = Counter()
        self._changed = set[int]()

    def exchange(
        self,
        requests: Requests,
        accept: Callable[[Message], Any],
        enough: int | None = None,
        least: int | None = None,
        timeouts: Timeouts | None = None,
    ) -> Replies:
        """Send requests, and note what did not come back as it should.

        Each side tells the other the newest hash of its audit, and notes what it was
        told: lines cut off at the end of one audit show in the other.
        """
        if not requests:
            return Replies({}, {}, {}, [], Counter())
        kinds = {head.kind for head, _ in requests.values()}
        told = self._note("sent", message=min(kinds), clients=len(requests))
        requests = {
            client: (head._replace(audit=told), payload)
            for client, (head, payload) in requests.items()
        }
        heads: dict[int, str] = {}

        def accept_and_note(reply: Message) -> Any:
            found = accept(reply)
            heads[reply.client] = one_line(reply.fields.get("audit"))
            if reply.fields.get("rows_changed") and reply.client not in self._changed:
                self._changed.add(reply.client)
                self.note_of(reply.client, "rows changed")
            return found

        replies = exchange(
            self._peers,
            requests,
            accept_and_note,
            timeouts or self._rules.timeouts,
            enough=enough,
            least=least,
            max_bytes=self._rules.largest_answer,
        )
        known = sorted(heads.items())
        for first in range(0, len(known), HEADS_PER_LINE):
            some = known[first : first + HEADS_PER_LINE]
            self._note("audits", **{str(client): head for client, head in some})
        for kind in ("refused", "rejected"):
            for client, why in getattr(replies, kind).items():
                self.note_of(client, kind, reason=why)
        for what, times in replies.strays.items():
            room = what in self.strays or len(self.strays) < MAX_STRAYS
            self.strays[what if room else "others"] += times
            self._note("stray", what=what, times=times)
        return replies

    def stop(self, experiment: str, clients: Iterable[int], over: bool) -> None:
        """Tell clients that an experiment stops; if it may go on, they keep its states.

        Nobody waits long for them: one that does not hear it ends the experiment by
        itself after some days.
        """
        head = Message("stop", experiment, UNKNOWN, fields={"over": over})
        quick = self._rules.timeouts._replace(deadline=STOP_DEADLINE, absence=0.0)
        requests = {client: (head._replace(client=client), ()) for client in clients}
        self.exchange(requests, lambda reply: None, least=0, timeouts=quick)

    def note_of(self, client: int, event: str, **fields: Any) -> None:
        """Note an event of a client, and what its node is called."""
        name = self._names.get(client)
        known = {} if name is None else {"node": name}
        self._note(event, client=client, **known, **fields)


class Collected(NamedTuple):
    """The sum of a round, and what became of its members."""

    total: Total
    replies: Replies
    asks: Mapping[int, PyTree]
    """What clients ask for from now on, of those who changed it."""


class PlainCollector:
    """Checks and sums the answers of single clients.

    ``join`` has the shapes of what arrives with enrollment, ``sizes`` the bits of each
    kind of message.
    """

    def __init__(self, server: "Coordinator", sizes: Sizes):
        self._server, self.join, self.sizes = server, server.shapes.join, sizes

    def joins(self, enrolled: Replies) -> RunningSum:
        """The sum of what all active clients send at enrollment."""
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
        """The sum of the updates of those members who have requests.

        ``others`` has what became of the enrollment of the others.

        Raises:
            BelowQuorum: too few replied; nothing has changed.
        """
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
        key = keys.derive(server.engine.key, "client", server.round, client)
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

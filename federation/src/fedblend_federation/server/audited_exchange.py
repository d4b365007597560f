# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's exchanges with its clients, with what the audit notes of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedblend.core import PyTree
from fedblend_federation.message import UNKNOWN, Message, one_line
from fedblend_federation.server.settings import RoundRules
from fedblend_federation.transport import Peers, Replies, Timeouts, exchange

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
        peers: Peers,
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
        requests: Mapping[int, tuple[Message, PyTree]],
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

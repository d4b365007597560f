# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Sending requests and collecting replies, with deadlines of our own.

A ``Transport`` carries bytes to addresses. ``exchange`` sends one request to each of
some clients and collects their replies. After an error or silence it sends the request
again; it counts and discards replies that are late, damaged or were not asked for.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedblend.core import PyTree
from fedblend.simulation.serialize import WireError
from fedblend_federation import message as messages
from fedblend_federation.message import Message, one_line

if TYPE_CHECKING:
    from fedblend_federation.server.membership import Membership

_REPEATED = ("experiment", "round", "digest")
"""Fields that a reply has in common with its request."""
Requests = Mapping[int, tuple[Message, PyTree]]
"""Head and payload of each client's request."""
Address = int
"""The transport's name of a node; it may change when the node restarts."""


class Reply(NamedTuple):
    """Bytes from a node, or the error that came in their place."""

    address: Address
    data: bytes | None
    error: str = ""


class ClientReply(NamedTuple):
    """Bytes from a client, or the error that came in their place."""

    client: int | None
    """None for a node that is no client here."""
    data: bytes | None
    error: str = ""


class Transport(Protocol):
    """Carries messages between the server and its nodes."""

    def addresses(self) -> list[Address]:
        """The nodes that can be reached now."""
        ...

    def send(self, outgoing: Mapping[Address, bytes]) -> None:
        """Send these messages; waits for a moment at most."""
        ...

    def receive(self) -> list[Reply]:
        """The replies since the last call; waits for a moment at most."""
        ...


class Timeouts(NamedTuple):
    """How long the server waits for replies, and how often it sends a request."""

    deadline: float = 600.0
    """Seconds for an exchange with all of its clients."""
    resend: float = 120.0
    """Seconds of silence after which a request is sent again."""
    pause: float = 2.0
    """Seconds between an error and the next attempt."""
    poll: float = 0.2
    """Seconds between two calls of ``Transport.receive``."""
    attempts: int = 20
    """Most requests to one client in an exchange."""
    absence: float = 45.0
    """Seconds without a connection after which nobody waits for a client any more, if
    enough others have replied."""


class Replies(NamedTuple):
    """The outcome of an exchange, by client."""

    accepted: dict[int, Any]
    """What ``accept`` returned for the client's reply."""
    refused: dict[int, str]
    """Reasons of clients that refused the request."""
    rejected: dict[int, str]
    """Reasons why the server rejected a client's reply."""
    silent: list[int]
    strays: Counter[str]
    """Descriptions of replies that belong to no open request, with their numbers."""

    def status(self, client: int) -> str:
        """One of "accepted", "rejected", "refused" and "silent"."""
        for name in ("accepted", "rejected", "refused"):
            if client in getattr(self, name):
                return name
        return "silent"


class Rejected(ValueError):
    """A reply that arrived whole and cannot be used, and why: one line."""


def exchange(
    peers: "Membership",
    requests: Requests,
    accept: Callable[[Message], Any],
    timeouts: Timeouts,
    *,
    enough: int | None = None,
    least: int | None = None,
    max_bytes: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Replies:
    """Send each client its request, and collect the replies.

    Args:
        peers: where clients are, and how messages travel.
        requests: head and payload of each client's request.
        accept: checks and decodes a reply, or raises ``Rejected`` or a ``WireError``.
        timeouts: how long to wait, and how often to send.
        enough: accepted replies after which the exchange ends; all of them if None.
        least: accepted replies with which the exchange ends when all other clients have
            no connection for ``timeouts.absence``; all of them if None.
        max_bytes: longer replies are rejected unread.
        clock: seconds.
        sleep: waits so many seconds.
    """
    replies = Replies({}, {}, {}, [], Counter())
    requests = {
        client: (messages.add_digest(head, payload), payload)
        for client, (head, payload) in requests.items()
    }
    started = clock()
    due = dict.fromkeys(requests, started)
    attempts: Counter[int] = Counter()
    lost: dict[int, float] = {}
    wanted = len(requests) if enough is None else min(enough, len(requests))

    def list_unanswered() -> list[int]:
        return [client for client in requests if replies.status(client) == "silent"]

    def only_absent() -> bool:
        """Whether enough replied, and all others have had no connection for long."""
        since = [clock() - lost.get(client, clock()) for client in list_unanswered()]
        met = least is not None and len(replies.accepted) >= least
        return met and all(seconds >= timeouts.absence for seconds in since)

    while list_unanswered() and len(replies.accepted) < wanted:
        if clock() - started >= timeouts.deadline or only_absent():
            break
        reachable, outgoing = peers.reachable(), {}
        lost = {
            client: lost.get(client, clock())
            for client in requests
            if client not in reachable
        }
        for client in list_unanswered():
            ready = clock() >= due[client] and attempts[client] < timeouts.attempts
            if ready and client in reachable:
                head, payload = requests[client]
                outgoing[client] = head._replace(attempt=attempts[client]), payload
                attempts[client] += 1
                due[client] = clock() + timeouts.resend
        if outgoing:
            peers.send(outgoing)
        for client, data, error in peers.receive():
            if data is None:
                # Something between the node and the server failed: send again.
                replies.strays[f"client {client}: {one_line(error)}"] += 1
                if client in due:
                    due[client] = clock() + timeouts.pause
            elif len(replies.accepted) >= wanted:
                replies.strays[f"client {client}: enough had replied"] += 1
            else:
                _sort(data, client, requests, replies, accept, max_bytes)
        if list_unanswered() and len(replies.accepted) < wanted:
            sleep(timeouts.poll)
    replies.silent.extend(list_unanswered())
    return replies


def _sort(
    data: bytes,
    sender: int | None,
    requests: Requests,
    replies: Replies,
    accept: Callable[[Message], Any],
    max_bytes: int | None,
) -> None:
    """Decode a reply and file it; the transport knows who sent it."""
    try:
        reply = messages.decode(data, max_bytes)
    except WireError as error:
        if sender is not None and sender in requests and sender not in replies.accepted:
            replies.rejected[sender] = f"damaged: {one_line(error)}"
        else:
            replies.strays[f"client {sender}: damaged: {one_line(error)}"] += 1
        return
    client = reply.client
    if client != sender or client not in requests:
        what = f"client {sender}: a reply of client {client} that was not asked for"
        replies.strays[what] += 1
        return
    request = requests[client][0]
    same = all(getattr(reply, name) == getattr(request, name) for name in _REPEATED)
    unreadable = (reply.experiment, reply.kind) == (messages.UNREADABLE, "refused")
    if not (same or unreadable) or reply.kind not in (request.kind, "refused"):
        what = f"client {client}: {reply.kind} of round {reply.round}"
        replies.strays[f"{what}, late or replayed"] += 1
    elif client in replies.accepted:
        replies.strays[f"client {client}: replies again"] += 1
    elif reply.kind == "refused":
        replies.refused[client] = one_line(reply.fields.get("reason"))
    else:
        try:
            replies.accepted[client] = accept(reply)
            replies.rejected.pop(client, None)
        except (Rejected, WireError) as error:
            replies.rejected[client] = one_line(error)

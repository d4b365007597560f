# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Sending messages and waiting for the answers, with a deadline of our own.

``Post`` is what a way of carrying messages has to offer; ``correspond`` sends one to
each of some clients and collects the answers: an error or silence is answered by
sending again, what is late, foreign or damaged is counted by name and thrown away.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedblend.deploy import messages
from fedblend.deploy.messages import Message
from fedblend.simulation.serialize import WireError

if TYPE_CHECKING:
    from fedblend.deploy.server.membership import Membership

_REPEATED = ("experiment", "round", "mark")
"""What an answer has in common with its question."""
Address = int
"""How the post calls a node; it may change when a node starts anew."""


class Reply(NamedTuple):
    """What came back: bytes, or word that the message could not be answered."""

    address: Address
    data: bytes | None
    error: str = ""


class Transport(Protocol):
    """Carries messages."""

    def addresses(self) -> list[Address]:
        """The nodes that can be reached now."""
        ...

    def send(self, mail: Mapping[Address, bytes]) -> None:
        """Send these; never waits."""
        ...

    def receive(self) -> list[Reply]:
        """What has come since the last call; never waits."""
        ...


class Patience(NamedTuple):
    """How long the server waits, and how often it asks."""

    deadline: float = 600.0
    """Seconds for an exchange with all of its clients."""
    resend: float = 120.0
    """Seconds of silence after which a message is sent again."""
    pause: float = 2.0
    """Seconds between an error and the next attempt."""
    poll: float = 0.2
    """Seconds between two looks into the message box."""
    attempts: int = 20
    """Messages to one client in an exchange."""


class Answers(NamedTuple):
    """What became of an exchange."""

    good: dict[int, Any]
    """What ``take`` made of each client's answer."""
    refused: dict[int, str]
    """Reasons, by client: it answered, and will not or cannot."""
    rejected: dict[int, str]
    """Reasons, by client: its answer was not usable."""
    silent: list[int]
    strays: Counter
    """Answers that belong to nothing that was asked, by what they are."""


class Rejected(ValueError):
    """An answer that arrived well and cannot be used, and why: one line."""


def exchange(
    directory: "Membership",
    asked: Mapping[int, tuple[Message, Any]],
    take: Callable[[Message], Any],
    patience: Patience,
    *,
    enough: int | None = None,
    longest: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answers:
    """Ask some clients, and wait for what they say.

    Args:
        directory: where clients are, and how messages travel.
        asked: the head of each client's message, and its message.
        take: makes something of an answer, or raises ``Rejected`` or a ``WireError``.
        patience: how long to wait, and how often to ask.
        enough: answers that will do; all of them if None.
        longest: bytes of an answer that are read at all.
        clock: seconds.
        sleep: waits so many seconds.
    """
    answers = Answers({}, {}, {}, [], Counter())
    asked = {
        c: (messages.marked(head, said), said) for c, (head, said) in asked.items()
    }
    begun = clock()
    due = dict.fromkeys(asked, begun)
    attempts: Counter = Counter()
    wanted = len(asked) if enough is None else min(enough, len(asked))

    def open_ones() -> list[int]:
        return [c for c in asked if not any(c in kind for kind in answers[:3])]

    while open_ones() and len(answers.good) < wanted:
        if clock() - begun >= patience.deadline:
            break
        reachable = directory.where()
        mail = {}
        for client in open_ones():
            ready = clock() >= due[client] and attempts[client] < patience.attempts
            if ready and client in reachable:
                head, payload = asked[client]
                message = head._replace(attempt=attempts[client])
                mail[reachable[client]] = messages.write(message, payload)
                attempts[client] += 1
                due[client] = clock() + patience.resend
        if mail:
            directory.send(mail)
        arrived = directory.receive()
        owners = {at: client for client, at in directory.clients.items()}
        for piece in arrived:
            client = owners.get(piece.address)
            if piece.data is not None and len(answers.good) >= wanted:
                answers.strays[f"client {client}: enough had answered"] += 1
                continue
            if piece.data is not None:
                _sort(piece.data, client, asked, answers, take, longest)
                continue
            # Something between the node and us failed: ask again.
            answers.strays[f"client {client}: {messages.line(piece.error)}"] += 1
            if client in due:
                due[client] = clock() + patience.pause
        if open_ones() and len(answers.good) < wanted:
            sleep(patience.poll)
    answers.silent.extend(open_ones())
    return answers


def _sort(
    data: bytes,
    sender: int | None,
    asked: Mapping[int, tuple[Message, Any]],
    answers: Answers,
    take: Callable[[Message], Any],
    longest: int | None,
) -> None:
    """Put an answer where it belongs; who sent it is known from the post."""
    try:
        message = messages.read(data, longest)
    except WireError as error:
        if sender is not None and sender in asked and sender not in answers.good:
            answers.rejected[sender] = f"damaged: {messages.line(error)}"
        else:
            answers.strays[f"client {sender}: damaged: {messages.line(error)}"] += 1
        return
    client = message.client
    if client != sender or client not in asked:
        what = f"client {sender}: an answer of client {client} that nobody asked for"
        answers.strays[what] += 1
        return
    head = asked[client][0]
    same = all(getattr(message, n) == getattr(head, n) for n in _REPEATED)
    unread = (message.experiment, message.kind) == (messages.UNREAD, "refused")
    if not (same or unread) or message.kind not in (head.kind, "refused"):
        what = f"client {client}: {message.kind} of round {message.round}"
        answers.strays[f"{what}, late or replayed"] += 1
    elif client in answers.good:
        answers.strays[f"client {client}: answers again"] += 1
    elif message.kind == "refused":
        answers.refused[client] = messages.line(message.words.get("reason"))
    else:
        try:
            answers.good[client] = take(message)
            answers.rejected.pop(client, None)
        except (Rejected, WireError) as error:
            answers.rejected[client] = messages.line(error)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who is where: nodes are met before anything is asked of them, and again when they
come back under another address.

A node is asked what it is; it answers with its client id and what the experiment needs
to know of it, its numbers of rows. Two nodes cannot be the same client at once.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedblend.deploy import messages
from fedblend.deploy.messages import Message
from fedblend.deploy.transport import Address, Reply, Transport
from fedblend.simulation.serialize import WireError

AGAIN = 15.0
"""Seconds after which a node that has not said who it is is asked again."""
LATER = 60.0
"""Seconds after which one that was turned away is: whoever was there in its name may be
gone by then, or its owner may have changed what kept it away."""


class Accept(Protocol):
    """Looks at what a node says of itself; the answer is why it is not taken."""

    def __call__(self, client: int, words: Mapping[str, Any]) -> str | None:
        """None if it is taken."""
        ...


class Membership:
    """The addresses of clients, kept up to date by meeting nodes."""

    def __init__(
        self,
        post: Transport,
        invitation: Message,
        accept: Accept,
        note: Callable[..., Any],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.post, self.invitation, self.accept = post, invitation, accept
        self.clients: dict[int, Address] = {}
        self.turned_away: dict[Address, str] = {}
        self._note, self._clock = note, clock
        self._asked: dict[Address, float] = {}

    def where(self) -> dict[int, Address]:
        """The clients that can be reached now; strangers are asked who they are."""
        present = set(self.post.addresses())
        now = self._clock()
        strangers = [
            address
            for address in sorted(present - set(self.clients.values()))
            if address not in self._asked
            or now - self._asked[address]
            >= (LATER if address in self.turned_away else AGAIN)
        ]
        if strangers:
            data = messages.write(self.invitation)
            self.post.send({address: data for address in strangers})
            self._asked.update(dict.fromkeys(strangers, now))
        return {c: address for c, address in self.clients.items() if address in present}

    def receive(self) -> list[Reply]:
        """What has come, without the answers to invitations."""
        rest = []
        for piece in self.post.receive():
            known = piece.address in self.clients.values()
            if known or piece.data is None or not self._met(piece.address, piece.data):
                rest.append(piece)
        return rest

    def send(self, mail: Mapping[Address, bytes]) -> None:
        """Send these."""
        self.post.send(mail)

    def _met(self, address: Address, data: bytes) -> bool:
        """Whether this was an answer to an invitation; then its sender is known."""
        try:
            message = messages.read(data)
        except WireError:
            return False
        if message.experiment not in (self.invitation.experiment, messages.UNREAD):
            return False
        if message.kind == "refused":
            self._turn_away(address, messages.line(message.words.get("reason")))
            return True
        if message.kind != "meet":
            return False
        client = message.client
        holder = self.clients.get(client)
        if holder is not None and holder in self.post.addresses():
            self._turn_away(address, f"client {client} is there already")
            return True
        why = self.accept(client, message.words)
        if why is not None:
            self._turn_away(address, why)
            return True
        self.clients[client] = address
        self.turned_away.pop(address, None)
        self._note("met", client=client)
        return True

    def _turn_away(self, address: Address, why: str) -> None:
        if self.turned_away.get(address) != why:
            self._note("turned away", node=str(address), reason=why)
        self.turned_away[address] = why

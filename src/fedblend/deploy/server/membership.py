# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which nodes take part: their addresses, and how they describe their rows.

The server asks every node that it can reach to describe itself. The reply has the
node's client id, its numbers of rows and, where the method needs them, a bound on the
rows of a table that it uses and the constants of its loss. A node that comes back under
another address is asked again. Two nodes cannot be the same client at once.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedblend.deploy import message as messages
from fedblend.deploy.contract import Contract
from fedblend.deploy.message import Message, schema_hash
from fedblend.deploy.server.settings import BelowQuorum
from fedblend.deploy.transport import Address, Reply, Timeouts, Transport
from fedblend.simulation.serialize import WireError
from fedblend.theory.constants import Smoothness

ASK_AGAIN = 15.0
"""Seconds after which a node that has not described itself is asked again."""
RETRY_DENIED = 60.0
"""Seconds after which a node that was denied is asked again: the node that had its
client id may be gone by then, or its operator may have changed what was wrong."""


Accept = Callable[[int, Mapping[str, Any]], str | None]
"""From a client id and a node's description to why the node is denied, or None."""


class Membership:
    """The addresses of the clients."""

    def __init__(
        self,
        transport: Transport,
        invitation: Message,
        accept: Accept,
        note: Callable[..., Any],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.transport, self.invitation, self.accept = transport, invitation, accept
        self.clients: dict[int, Address] = {}
        self.denied: dict[Address, str] = {}
        self._note, self._clock = note, clock
        self._asked: dict[Address, float] = {}

    def reachable(self) -> dict[int, Address]:
        """The clients that can be reached now; other nodes are asked who they are."""
        present, now = set(self.transport.addresses()), self._clock()
        unknown = [
            address
            for address in sorted(present - set(self.clients.values()))
            if address not in self._asked
            or now - self._asked[address]
            >= (RETRY_DENIED if address in self.denied else ASK_AGAIN)
        ]
        if unknown:
            data = messages.encode(self.invitation)
            self.transport.send({address: data for address in unknown})
            self._asked.update(dict.fromkeys(unknown, now))
        return {c: address for c, address in self.clients.items() if address in present}

    def receive(self) -> list[Reply]:
        """The replies since the last call, without descriptions."""
        rest = []
        for reply in self.transport.receive():
            known = reply.address in self.clients.values()
            if known or reply.data is None or not self._join(reply.address, reply.data):
                rest.append(reply)
        return rest

    def _join(self, address: Address, data: bytes) -> bool:
        """Whether these bytes were a reply to the invitation; then they are handled."""
        try:
            reply = messages.decode(data)
        except WireError:
            return False
        invited = reply.experiment in (self.invitation.experiment, messages.UNREADABLE)
        if not invited or reply.kind not in ("describe", "refused"):
            return False
        client, holder = reply.client, self.clients.get(reply.client)
        if reply.kind == "refused":
            why = messages.one_line(reply.fields.get("reason"))
        elif holder is not None and holder in self.transport.addresses():
            why = f"client {client} is there already"
        else:
            why = self.accept(client, reply.fields)
        if why is None:
            self.clients[client] = address
            self.denied.pop(address, None)
            self._note("joined", client=client)
        else:
            if self.denied.get(address) != why:
                self._note("denied", node=str(address), reason=why)
            self.denied[address] = why
        return True


class Description(NamedTuple):
    """What one node describes of its rows."""

    counts: dict[str, int]
    """Its rows in each split."""
    rooms: dict[str, int]
    """A bound on the rows that it uses, of each table of ``[select]``."""
    constants: tuple[float, float, bool] | None
    """L_i, mu_i and whether they are exact; None if the node withholds them."""


class Census(NamedTuple):
    """What all nodes describe of their rows."""

    counts: dict[str, np.ndarray]
    """Every client's rows in each split."""
    rooms: dict[str, int]
    constants: Smoothness | None
    """None where the method does not use them, or a node withholds its own."""
    withheld: tuple[int, ...] = ()
    """Clients that withhold their constants."""


class Descriptions:
    """Checks and collects descriptions.

    ``census`` is the one that the experiment began with, if it has begun.
    """

    def __init__(self, contract: Contract, census: Census | None):
        self.contract, self.census = contract, census
        self.row = schema_hash(contract.row)
        self.found: dict[int, Description] = {}

    def accept(self, client: int, description: Mapping[str, Any]) -> str | None:
        """Why a node with this description is denied; None if it is accepted."""
        clients, sizes = self.contract.clients, self.contract.table_sizes
        if not 0 <= client < clients:
            return f"client {client} is not one of the {clients} of data.clients"
        counts: Any = description.get("counts")
        rooms: Any = description.get("rooms", {})
        constants: Any = description.get("constants")
        if not _numbers(counts, self.contract.splits, 0) or counts["train"] < 1:
            return f"client {client} sends no usable numbers of rows"
        if description.get("row") != self.row:
            return f"client {client} has rows of another shape"
        if not _numbers(rooms, sizes, 1) or any(
            rooms[name] > size for name, size in sizes.items()
        ):
            return f"client {client} sends no usable numbers of rows that it uses"
        if constants is not None and not _usable(constants):
            return f"client {client} sends no usable constants"
        if self.census is not None:
            before = {
                name: int(all[client]) for name, all in self.census.counts.items()
            }
            if counts != before:
                return f"client {client} has {counts} rows now, and began with {before}"
            if any(rooms[name] > room for name, room in self.census.rooms.items()):
                return f"client {client} uses more rows than it began with: {rooms}"
        own = None if constants is None else tuple(constants)
        self.found[client] = Description(dict(counts), dict(rooms), own)
        return None

    def collect(self, membership: Membership, timeouts: Timeouts) -> Census:
        """The census; waits until every client has joined once."""
        if self.census is not None:
            return self.census
        started, clients = time.monotonic(), range(self.contract.clients)
        while len(self.found) < len(clients):
            membership.reachable()
            membership.receive()
            missing = sorted(set(clients) - set(self.found))
            if missing and time.monotonic() - started > timeouts.deadline:
                denied = "; ".join(sorted(set(membership.denied.values())))
                raise BelowQuorum(
                    f"clients {missing} did not join"
                    + (f", others were denied: {denied}" if denied else "")
                )
            if missing:
                time.sleep(timeouts.poll)
        found = [self.found[client] for client in clients]
        counts = {
            name: np.array([one.counts[name] for one in found], np.int64)
            for name in self.contract.splits
        }
        rooms = {
            name: max(one.rooms[name] for one in found)
            for name in self.contract.table_sizes
        }
        if not self.contract.uses_constants:
            return Census(counts, rooms, None)
        withheld = [c for c, one in enumerate(found) if one.constants is None]
        if withheld:
            return Census(counts, rooms, None, tuple(withheld))
        known = [one.constants for one in found if one.constants is not None]
        smooth, convex, exact = zip(*known, strict=True)
        numbers = np.array(smooth, float), np.array(convex, float)
        return Census(counts, rooms, Smoothness(*numbers, all(exact)))


def _numbers(found: Any, names: Any, least: int) -> bool:
    return (
        isinstance(found, dict)
        and set(found) == set(names)
        and all(type(n) is int and least <= n < 2**31 for n in found.values())
    )


def _usable(constants: Any) -> bool:
    """Whether these are 0 <= mu_i <= L_i, and whether they are exact."""
    if not isinstance(constants, list) or len(constants) != 3:
        return False
    *numbers, exact = constants
    if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
        return False
    smooth, convex = numbers
    return isinstance(exact, bool) and 0 <= convex <= smooth

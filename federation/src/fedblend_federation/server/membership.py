# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Which nodes take part: their addresses, their clients, and what they describe.

The server asks every node that it can reach to describe itself: numbers of rows and,
where the method needs them, a bound on the rows of a table that the node uses and the
constants of its loss. ``census`` has the descriptions of all.

A node that comes back under another address is asked again. Two nodes cannot be the
same client at once, and where the keys of the nodes are registered, a key belongs to
its clients. A node that hosts several clients replies with a bundle of descriptions,
and gets its requests in bundles.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.tables.federation import Federation
from fedblend.core import PyTree
from fedblend.simulation.serialize import WireError
from fedblend.theory.constants import Smoothness
from fedblend_federation import message as messages
from fedblend_federation.contract import Contract
from fedblend_federation.message import UNKNOWN, Message, schema_hash
from fedblend_federation.ops.settings import name_clients
from fedblend_federation.raw_tables import Statistics, statistics_in
from fedblend_federation.server.settings import BelowQuorum, fraction_of
from fedblend_federation.transport import (
    Address,
    ClientReply,
    Requests,
    Timeouts,
    Transport,
)

ASK_AGAIN = 15.0
"""Seconds after which a node that has not described itself is asked again."""
RETRY_DENIED = 60.0
"""Seconds after which a node that was denied is asked again: the node that had its
client id may be gone by then, or its operator may have changed what was wrong."""
BUNDLE_BYTES = 32 << 20
"""Bytes of the messages in a bundle; a node may want fewer."""

Accept = Callable[[int, Mapping[str, Any]], str | None]
"""From a client id and a node's description to why the node is denied, or None."""


class Registered(NamedTuple):
    """A node whose key the server knows, and the clients that the key is of."""

    name: str
    clients: tuple[int, ...]


def invitation(experiment: str, config: str) -> Message:
    """What asks a node to describe itself, for an experiment of this configuration."""
    return Message("describe", experiment, UNKNOWN, fields={"config": config})


class Membership:
    """The addresses of the clients.

    Args:
        transport: carries messages.
        invitation: asks a node to describe itself.
        accept: why a node is denied, or None.
        note: writes to the audit.
        clock: seconds.
        registered: nodes by address, where an address is given to a key; without it a
            node is the client that it says.
        check: called whenever the server waits; may raise to end the wait.
    """

    def __init__(
        self,
        transport: Transport,
        invitation: Message,
        accept: Accept,
        note: Callable[..., Any],
        clock: Callable[[], float] = time.monotonic,
        registered: Mapping[Address, Registered] | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        self.transport, self.invitation, self.accept = transport, invitation, accept
        self.registered, self.check = registered, check
        self.clients: dict[int, Address] = {}
        self.denied: dict[Address, dict[int, str]] = {}
        """Why clients of a node were denied."""
        self._note, self._clock = note, clock
        self._asked: dict[tuple[Address, int], float] = {}
        self._hosted: dict[Address, set[int]] = defaultdict(set)
        """Clients by address, the inverse of ``clients``."""
        self._bundles: dict[Address, int] = {}
        """Nodes that host several clients, and how many bytes each accepts."""

    def reachable(self) -> dict[int, Address]:
        """The clients that can be reached now; other nodes are asked who they are."""
        self.check()
        present = set(self.transport.addresses())
        unknown, data = [], messages.encode(self.invitation)
        for address in sorted(present):
            denied = self.denied.get(address, {})
            if not self._hosted.get(address):
                pause = RETRY_DENIED if denied else ASK_AGAIN
                unknown += [address] if self._is_due(address, UNKNOWN, pause) else []
                continue
            for client in denied:  # while others of the node take part
                if self._is_due(address, client, RETRY_DENIED):
                    again = messages.encode(self.invitation._replace(client=client))
                    self.transport.send({address: again})
        if unknown:
            self.transport.send(dict.fromkeys(unknown, data))
        return {c: address for c, address in self.clients.items() if address in present}

    def _is_due(self, address: Address, client: int, pause: float) -> bool:
        """Whether a node is to be asked who it is, so long after the last time."""
        now = self._clock()
        if now - self._asked.get((address, client), now - pause) < pause:
            return False
        self._asked[address, client] = now
        return True

    def send(self, requests: Requests) -> None:
        """Send clients their requests; those of clients of one node as bundles."""
        plain, bundled = {}, defaultdict(list)
        for client, request in requests.items():
            address = self.clients[client]
            if address in self._bundles:
                bundled[address].append((client, *request))
            else:
                plain[address] = messages.encode(*request)
        if plain:
            self.transport.send(plain)
        for address, some in bundled.items():
            for data in _bundles(some, self._bundles[address]):
                self.transport.send({address: data})

    def receive(self) -> list[ClientReply]:
        """The clients' replies since the last call, without descriptions."""
        rest = []
        for address, data, error in self.transport.receive():
            hosted = self._hosted.get(address, set())
            if data is None:
                lost = sorted(hosted) or [None]
                rest += [ClientReply(client, None, error) for client in lost]
                continue
            for client, part in self._parts(address, data):
                known = client in hosted
                if known or not self._join(address, client, part):
                    rest.append(ClientReply(client if known else None, part))
        return rest

    def _parts(self, address: Address, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The messages that came from a node, with whom the node says they are from."""
        hosted = self._hosted.get(address, set())
        if messages.is_bundle(data):
            try:
                yield from messages.unpack_bundle(data)
            except WireError:
                yield from ((client, data) for client in hosted)
        elif len(hosted) == 1 and address not in self._bundles:
            yield from ((client, data) for client in hosted)
        else:
            try:
                yield messages.decode(data).client, data
            except WireError:
                yield UNKNOWN, data

    def _join(self, address: Address, sender: int, data: bytes) -> bool:
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
        elif client != sender:
            why = f"it says client {client} in place of client {sender}"
        elif (other := self._impostor(address, client)) is not None:
            why = other
        elif holder is not None and holder in self.transport.addresses():
            why = f"client {client} is there already"
        else:
            why = self.accept(client, reply.fields)
        if why is None:
            if holder is not None:
                self._hosted[holder].discard(client)
            self.clients[client] = address
            self._hosted[address].add(client)
            room = reply.fields.get("bundle_bytes")
            if type(room) is int:
                self._bundles[address] = max(min(room, BUNDLE_BYTES), 1)
            self.denied.get(address, {}).pop(client, None)
            self._note("joined", client=client)
        else:
            denied = self.denied.setdefault(address, {})
            if denied.get(client) != why:
                self._note("denied", node=self.name(address), reason=why)
            denied[client] = why
        return True

    def name(self, address: Address) -> str:
        """What the node at an address is called."""
        known = (self.registered or {}).get(address)
        return f"at {address}" if known is None else known.name

    def denials(self) -> str:
        """Which nodes were denied, and why, in a line."""
        lines = {
            f"{self.name(at)}: {why}"
            for at, clients in self.denied.items()
            for why in clients.values()
        }
        return "; ".join(sorted(lines))

    @property
    def is_settled(self) -> bool:
        """Whether every node that is connected has joined, or was denied."""
        return all(
            self._hosted.get(address) or self.denied.get(address)
            for address in self.transport.addresses()
        )

    def _impostor(self, address: Address, client: int) -> str | None:
        """Why a node cannot be this client, by its key."""
        if self.registered is None:
            return None
        known = self.registered.get(address)
        if known is None:
            return "its key is not one of server.toml"
        if client not in known.clients:
            return (
                f"it says client {client}, its key is of {name_clients(known.clients)}"
            )
        return None


def _bundles(
    requests: Sequence[tuple[int, Message, PyTree]], room: int
) -> Iterator[bytes]:
    """The requests of clients of one node, as bundles of so many bytes.

    What counts are the bytes of all messages: a reply is about as large as its request,
    and replies are seldom equal.
    """
    some, size = [], 0
    for client, head, payload in requests:
        data = messages.encode(head, payload)
        if some and size + len(data) > room:
            yield messages.pack_bundle(some)
            some, size = [], 0
        some.append((client, data))
        size += len(data)
    yield messages.pack_bundle(some)


class Description(NamedTuple):
    """What one node describes of its rows."""

    counts: dict[str, int]
    """Its rows in each split."""
    constants: tuple[float, float, bool] | None
    """L_i, mu_i and whether they are exact; None if the node withholds them."""
    statistics: Statistics | None = None
    """Of its training rows, where it has a raw table."""


class Census(NamedTuple):
    """What all nodes describe of their rows."""

    counts: dict[str, np.ndarray]
    """Every client's rows in each split."""
    constants: Smoothness | None
    """None where the method does not use them, or a node withholds its own."""
    withheld: tuple[int, ...] = ()
    """Clients that withhold their constants."""
    absent: tuple[int, ...] = ()
    """Clients that were not there when the experiment began; they have no rows."""
    statistics: tuple[Statistics, ...] = ()
    """Of the nodes with raw tables; needed once, and not in a checkpoint."""


class Descriptions:
    """Checks and collects descriptions.

    ``begun`` are those that the experiment began with, if it has begun, and ``retired``
    are clients that have left the federation.
    """

    def __init__(
        self,
        contract: Contract,
        begun: Mapping[int, Description] | None,
        retired: Sequence[int] = (),
    ):
        self.contract, self.begun, self.retired = contract, begun, retired
        self.max_rows = (contract.config.federation or Federation()).max_rows
        self.row = schema_hash(contract.row)
        self.found: dict[int, Description] = {}

    def accept(self, client: int, description: Mapping[str, Any]) -> str | None:
        """Why a node with this description is denied; None if it is accepted."""
        clients = self.contract.clients
        if not 0 <= client < clients:
            return f"client {client} is not one of the {clients} of data.clients"
        counts: Any = description.get("counts")
        constants: Any = description.get("constants")
        if not _numbers(counts, self.contract.splits) or counts["train"] < 1:
            return f"client {client} sends no usable numbers of rows"
        if max(counts.values()) > self.max_rows:
            claimed, most = max(counts.values()), self.max_rows
            return f"client {client} has {claimed} rows, federation.max_rows is {most}"
        if description.get("row") != self.row:
            return f"client {client} has rows of another shape"
        if constants is not None and not _usable(constants):
            return f"client {client} sends no usable constants"
        schema, statistics = self.contract.schema, None
        if schema is not None:
            told = description.get("statistics")
            statistics = statistics_in(schema, told, counts["train"])
            if statistics is None:
                return f"client {client} sends no usable statistics of data.raw"
        if self.begun is not None:
            if client not in self.begun:
                return f"client {client} was not there when the experiment began"
            before = self.begun[client].counts
            if counts != before:
                return f"client {client} has {counts} rows now, and began with {before}"
        own = None if constants is None else tuple(constants)
        found = Description(dict(counts), own, statistics)
        self.found[client] = found
        return None

    def collect(
        self, membership: Membership, timeouts: Timeouts, quorum: float
    ) -> Census:
        """The census.

        Waits until every client has joined once. A fraction ``quorum`` of them is
        enough after the deadline, or as soon as all others have had no connection for
        ``timeouts.absence``; those take no part.

        Raises:
            BelowQuorum: too few joined, and why.
        """
        if self.begun is not None:
            return self._census(self.begun)
        started = time.monotonic()
        expected = sorted(set(range(self.contract.clients)) - set(self.retired))
        least = fraction_of(quorum, len(expected))
        while len(self.found) < len(expected):
            membership.reachable()
            membership.receive()
            waited, enough = time.monotonic() - started, len(self.found) >= least
            if enough and waited > timeouts.absence and membership.is_settled:
                break
            if waited > timeouts.deadline:
                if enough:
                    break
                raise BelowQuorum(self._missing(membership, expected))
            if len(self.found) < len(expected):
                time.sleep(timeouts.poll)
        return self._census(self.found)

    def _missing(self, membership: Membership, expected: Sequence[int]) -> str:
        known = (membership.registered or {}).values()
        names = {client: one.name for one in known for client in one.clients}
        gone = [client for client in expected if client not in self.found]
        who = ", ".join(f"{c} ({names[c]})" if c in names else str(c) for c in gone)
        denied = membership.denials()
        return f"client {who} did not join" + (f"; denied: {denied}" if denied else "")

    def _census(self, found: Mapping[int, Description]) -> Census:
        clients = range(self.contract.clients)
        absent = tuple(client for client in clients if client not in found)
        counts = {
            name: np.array(
                [found[c].counts[name] if c in found else 0 for c in clients], np.int64
            )
            for name in self.contract.splits
        }
        if not self.contract.uses_constants:
            known = [found[client].statistics for client in sorted(found)]
            told = tuple(one for one in known if one is not None)
            return Census(counts, None, absent=absent, statistics=told)
        known = [found[c].constants if c in found else None for c in clients]
        withheld = tuple(c for c, own in enumerate(known) if own is None)
        constants = None
        if not withheld:
            smooth, convex, exact = zip(*filter(None, known), strict=True)
            numbers = np.array(smooth, float), np.array(convex, float)
            constants = Smoothness(*numbers, all(exact))
        return Census(counts, constants, withheld, absent)


def _numbers(found: Any, names: Any) -> bool:
    return (
        isinstance(found, dict)
        and set(found) == set(names)
        and all(type(n) is int and 0 <= n < 2**31 for n in found.values())
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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What nodes describe of their rows, and the census of all of them.

A description has numbers of rows and, where the method needs them, a bound on the rows
of a table that the node uses and the constants of its loss.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.tables.federation import Federation
from fedblend.theory.constants import Smoothness
from fedblend_federation.contract import Contract
from fedblend_federation.message import schema_hash
from fedblend_federation.raw_tables import Statistics, statistics_in
from fedblend_federation.server.membership import Membership
from fedblend_federation.server.settings import BelowQuorum, fraction_of
from fedblend_federation.transport import Timeouts


class Description(NamedTuple):
    """What one node describes of its rows."""

    counts: dict[str, int]
    """Its rows in each split."""
    rooms: dict[str, int]
    """A bound on the rows that it uses, of each table of ``[select]``."""
    constants: tuple[float, float, bool] | None
    """L_i, mu_i and whether they are exact; None if the node withholds them."""
    statistics: Statistics | None = None
    """Of its training rows, where it has a raw table."""


class Census(NamedTuple):
    """What all nodes describe of their rows."""

    counts: dict[str, np.ndarray]
    """Every client's rows in each split."""
    rooms: dict[str, int]
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

    ``census`` is the one that the experiment began with, if it has begun, and
    ``retired`` are clients that have left the federation.
    """

    def __init__(
        self, contract: Contract, census: Census | None, retired: Sequence[int] = ()
    ):
        self.contract, self.census, self.retired = contract, census, retired
        self.max_rows = (contract.config.federation or Federation()).max_rows
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
        if max(counts.values()) > self.max_rows:
            claimed, most = max(counts.values()), self.max_rows
            return f"client {client} has {claimed} rows, federation.max_rows is {most}"
        if description.get("row") != self.row:
            return f"client {client} has rows of another shape"
        if not _numbers(rooms, sizes, 1) or any(
            rooms[name] > size for name, size in sizes.items()
        ):
            return f"client {client} sends no usable numbers of rows that it uses"
        if constants is not None and not _usable(constants):
            return f"client {client} sends no usable constants"
        schema, statistics = self.contract.schema, None
        if schema is not None:
            told = description.get("statistics")
            statistics = statistics_in(schema, told, counts["train"])
            if statistics is None:
                return f"client {client} sends no usable statistics of data.raw"
        if self.census is not None:
            if client in self.census.absent:
                return f"client {client} was not there when the experiment began"
            before = {
                name: int(all[client]) for name, all in self.census.counts.items()
            }
            if counts != before:
                return f"client {client} has {counts} rows now, and began with {before}"
            if any(rooms[name] > room for name, room in self.census.rooms.items()):
                return f"client {client} uses more rows than it began with: {rooms}"
        own = None if constants is None else tuple(constants)
        found = Description(dict(counts), dict(rooms), own, statistics)
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
        if self.census is not None:
            return self.census
        started = time.monotonic()
        expected = sorted(set(range(self.contract.clients)) - set(self.retired))
        least = fraction_of(quorum, len(expected))
        while len(self.found) < len(expected):
            membership.reachable()
            membership.receive()
            waited, enough = time.monotonic() - started, len(self.found) >= least
            if enough and waited > timeouts.absence and membership.settled:
                break
            if waited > timeouts.deadline:
                if enough:
                    break
                raise BelowQuorum(self._missing(membership, expected))
            if len(self.found) < len(expected):
                time.sleep(timeouts.poll)
        return self._census()

    def _missing(self, membership: Membership, expected: Sequence[int]) -> str:
        known = (membership.registered or {}).values()
        names = {client: one.name for one in known for client in one.clients}
        gone = [client for client in expected if client not in self.found]
        who = ", ".join(f"{c} ({names[c]})" if c in names else str(c) for c in gone)
        denied = membership.denials()
        return f"client {who} did not join" + (f"; denied: {denied}" if denied else "")

    def _census(self) -> Census:
        clients, found = range(self.contract.clients), self.found
        absent = tuple(client for client in clients if client not in found)
        counts = {
            name: np.array(
                [found[c].counts[name] if c in found else 0 for c in clients], np.int64
            )
            for name in self.contract.splits
        }
        rooms = {
            name: max(one.rooms[name] for one in found.values())
            for name in self.contract.table_sizes
        }
        if not self.contract.uses_constants:
            known = [found[client].statistics for client in sorted(found)]
            told = tuple(one for one in known if one is not None)
            return Census(counts, rooms, None, absent=absent, statistics=told)
        known = [found[c].constants if c in found else None for c in clients]
        withheld = tuple(c for c, own in enumerate(known) if own is None)
        constants = None
        if not withheld:
            smooth, convex, exact = zip(*filter(None, known), strict=True)
            numbers = np.array(smooth, float), np.array(convex, float)
            constants = Smoothness(*numbers, all(exact))
        return Census(counts, rooms, constants, withheld, absent)


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

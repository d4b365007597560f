# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who has come to a federation, and what each said of its rows.

That is how many they are and, where the method asks for it, how many rows of a table
they use, and the constants of their loss.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedblend.config.config import Config
from fedblend.config.transforms import table_sizes
from fedblend.deploy.contract import (
    SPLITS,
    asks_constants,
    nodes_of,
    params_of,
    row_of,
    task_of,
)
from fedblend.deploy.messages import fingerprint
from fedblend.deploy.server.membership import Membership
from fedblend.deploy.server.settings import BelowQuorum
from fedblend.deploy.transport import Patience
from fedblend.theory.constants import Smoothness


class Said(NamedTuple):
    """What a node said of itself."""

    counts: dict[str, int]
    """Its rows in each split."""
    rooms: dict[str, int]
    """A bound on the rows that it uses, of each table of ``[select]``."""
    constants: tuple[float, float, bool] | None
    """L_i, mu_i and whether they are exact; None if it does not tell."""


class Known(NamedTuple):
    """What all of them said."""

    counts: dict[str, np.ndarray]
    """Every client's rows in each split."""
    rooms: dict[str, int]
    constants: Smoothness | None
    """None where they are not asked for, or somebody does not tell."""
    silent: tuple[int, ...] = ()
    """Clients that do not tell."""


class Attendance:
    """Takes what nodes say of themselves; ``known`` is what they once said."""

    def __init__(self, config: Config, clients: int, known: Known | None):
        self.config, self.clients, self.known = config, clients, known
        self.row = fingerprint(row_of(task_of(config)))
        self.sizes = table_sizes(config, params_of(config))
        self.said: dict[int, Said] = {}

    def accept(self, client: int, words: Mapping[str, Any]) -> str | None:
        """Why a node that says this of itself is not taken."""
        if not 0 <= client < self.clients:
            return f"client {client} is not one of the {self.clients} of data.clients"
        counts: Any = words.get("counts")
        rooms: Any = words.get("rooms", {})
        data = nodes_of(self.config)
        wanted = {"train": True, "validation": data.validation, "test": data.test}
        names = {name for name, needed in wanted.items() if needed}
        if not _numbers(counts, names, 0) or counts["train"] < 1:
            return f"client {client} says no usable numbers of rows"
        if words.get("row") != self.row:
            return f"client {client} has rows of another shape"
        if not _numbers(rooms, set(self.sizes), 1) or any(
            rooms[name] > size for name, size in self.sizes.items()
        ):
            return f"client {client} says no usable numbers of rows that it uses"
        constants = words.get("constants")
        if constants is not None and not _usable(constants):
            return f"client {client} says no usable constants"
        why = self._moved(client, counts, rooms)
        if why is None:
            told = None if constants is None else tuple(constants)
            self.said[client] = Said(dict(counts), dict(rooms), told)
        return why

    def _moved(self, client: int, counts: dict, rooms: dict) -> str | None:
        """Why a node is another one than before; None as long as nothing is settled."""
        if self.known is None:
            return None
        before = {name: int(held[client]) for name, held in self.known.counts.items()}
        if counts != before:
            return f"client {client} has {counts} rows now, and began with {before}"
        if any(rooms[name] > room for name, room in self.known.rooms.items()):
            return f"client {client} uses more rows than it began with: {rooms}"
        return None

    def complete(self, directory: Membership, patience: Patience) -> Known:
        """What all clients said; waits until every one has been met once."""
        if self.known is not None:
            return self.known
        begun = time.monotonic()
        while len(self.said) < self.clients:
            directory.where()
            directory.receive()
            lacking = sorted(set(range(self.clients)) - set(self.said))
            if lacking and time.monotonic() - begun > patience.deadline:
                away = "; ".join(sorted(set(directory.turned_away.values())))
                raise BelowQuorum(
                    f"clients {lacking} did not come"
                    + (f", others were turned away: {away}" if away else "")
                )
            if lacking:
                time.sleep(patience.poll)
        ordered = [self.said[client] for client in range(self.clients)]
        counts = {
            name: np.array([said.counts[name] for said in ordered], np.int64)
            for name in SPLITS
            if name in ordered[0].counts
        }
        rooms = {name: max(said.rooms[name] for said in ordered) for name in self.sizes}
        silent = [c for c, said in enumerate(ordered) if said.constants is None]
        if not asks_constants(self.config):
            return Known(counts, rooms, None)
        if silent:
            return Known(counts, rooms, None, tuple(silent))
        told = [said.constants for said in ordered if said.constants is not None]
        return Known(counts, rooms, together(told))


def together(told: list[tuple[float, float, bool]]) -> Smoothness:
    """The constants of all clients, in their order."""
    smooth, convex, exact = zip(*told, strict=True)
    return Smoothness(np.array(smooth, float), np.array(convex, float), all(exact))


def _numbers(said: Any, names: set[str], least: int) -> bool:
    return (
        isinstance(said, dict)
        and set(said) == names
        and all(type(n) is int and least <= n < 2**31 for n in said.values())
    )


def _usable(constants: Any) -> bool:
    """Whether this is 0 <= mu_i <= L_i, and whether they are exact."""
    if not isinstance(constants, list) or len(constants) != 3:
        return False
    *numbers, exact = constants
    if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
        return False
    smooth, convex = numbers
    return isinstance(exact, bool) and 0 <= convex <= smooth

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What all nodes and the server know of one attempt at a secure sum.

All keys are derived from the digest of an attempt, so that no mask of one attempt fits
another one. A ``View`` is what a node was told of an attempt; nodes with different
views do not share masks, and the answer of a node cannot be read unless enough others
have the same view.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fedblend_federation.secure.fixed_point import FixedPoint
from fedblend_federation.secure.graph import Graph, graph_of
from fedblend_federation.secure.masks import SecureError

MAX_ATTEMPTS = 10_000
"""Of a round."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt at the sum of a round, over some members.

    ``keys`` are the members' public keys: those of the roster of whoever looks.
    ``terms`` is a hash of all that a node was enrolled with: the configuration, which
    names a frozen base by its hash, capacities, rooms, rates, preprocessing and first
    parameters. None of it differs by client.
    """

    experiment: str
    round: int
    number: int
    keys: Mapping[int, bytes]
    fixed_point: FixedPoint
    terms: str

    @property
    def members(self) -> tuple[int, ...]:
        """The clients, in order."""
        return tuple(sorted(self.keys))

    @cached_property
    def digest(self) -> bytes:
        """Names the attempt; nodes with other keys or terms have another digest."""
        keys = [(client, self.keys[client].hex()) for client in self.members]
        about = self.experiment, self.round, self.number, keys
        return digest_of(*about, tuple(self.fixed_point), self.terms)

    @cached_property
    def graph(self) -> Graph:
        """Who masks with whom; the server knows it without the keys."""
        seed = graph_seed(self.experiment, self.round, self.number, self.members)
        return graph_of(self.members, seed)


class View(NamedTuple):
    """What a node was told before it answered."""

    nonces: Mapping[int, str]
    """By client, of those who have handed out shares: U1."""
    broadcast: str
    """The ``story`` up to the message of the round."""
    largest: float
    """The weight that counts as 1."""

    def digest(self, attempt: bytes) -> bytes:
        """Names the view of an attempt of that digest."""
        told = sorted(self.nonces.items())
        return digest_of(attempt.hex(), told, self.broadcast, self.largest)


def digest_of(*parts: Any) -> bytes:
    """A hash of some numbers and texts."""
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def story(before: str, messages: Sequence[str]) -> str:
    """A hash of the messages of all rounds, from hashes of single ones.

    A node's state depends on the messages that it got before: who got another one
    makes noise in all later rounds, too.
    """
    for message in messages:
        before = digest_of(before, message).hex()
    return before


def graph_seed(
    experiment: str, round: int, number: int, members: Sequence[int]
) -> bytes:
    """Puts the members of an attempt in their order."""
    return digest_of(experiment, round, number, list(members))


def some_of(clients: Any, known: Any, what: str) -> list[int]:
    """A list of different clients in order, all of them known.

    Raises:
        SecureError: it is something else.
    """
    fits = isinstance(clients, list) and all(type(one) is int for one in clients)
    if not fits or sorted(set(clients)) != clients:
        raise SecureError(f"message: {what} are not different clients in order")
    for client in clients:
        if client not in known:
            raise SecureError(f"message: client {client} is not one of the {what}")
    return clients

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""An attempt at a secure sum: who masks with whom, and what each side does.

All keys are derived from the digest of an attempt, so that no mask of one attempt fits
another. A ``View`` is what a node was told of an attempt.

Nodes i and j have a seed k_ij that nobody else can compute, by X25519. In an attempt a
node i also draws a seed b_i and a key e_i::

    share   sends its holders shares of b_i and of e_i, in boxes for each, and all k_ij
            in a box under e_i
    mask    sends x_i + mask(b_i) + sum of mask(k_ij) over j > i - the same over j < i
    open    gives its share of b_j where x_j has arrived, that of e_j where it has not

The masks of pairs cancel in a sum. The server removes the others with b_i of all who
answered and e_i of all who did not; with both of one client it would have its x_i. So
an honest node opens one view of a round, ever. What it gives is in a box under a key
r_i, which is shared among its holders: a holder's token, which depends on the holder's
own view, opens one share of r_i. A server that tells nodes different things therefore
cannot read what they give.

Boxes that do not open are named, and what the others hold may be enough. A server that
spoils boxes gains nothing: of each it gets one share less, of the view that the node
opens. A node checks every set that it is asked about, whatever it was told of boxes.

A node's holders are its neighbors and itself; ``threshold`` of them recover what it
leaves behind. All n nodes are neighbors in a small cohort, with threshold ceil(2n/3).
In a large one the nodes stand in a circle, in an order drawn from the attempt, and a
node's neighbors are the k nearest. k and the threshold t are the smallest for which all
of this holds for every node, up to small probabilities, by tails of the hypergeometric
distribution: with x of its k + 1 holders colluding with the server, 2t > k + 1 + x, so
that honest holders who are told different things do not make up two thresholds; and at
least t holders are left when a third of all nodes are gone.

References: Bonawitz et al., "Practical secure aggregation for privacy-preserving
machine learning", CCS 2017; Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure
single-server aggregation with (poly)logarithmic overhead", CCS 2020. Where this differs
from the papers: keys are exchanged once, seeds of pairs are recovered and never a
node's key, masks depend on the message of the round, tokens take the place of a round
in which views are compared, and 2t > k + 1 + x is for a server that lies.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from math import comb
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)

from fedblend_federation.secure import masks
from fedblend_federation.secure.flatten import FixedPoint
from fedblend_federation.secure.masks import (
    KEY_BYTES,
    OVERHEAD,
    SecureError,
    add_mask,
    derive,
    seal,
    unseal,
)
from fedblend_federation.secure.masks import unseal as opened

COMPLETE = 50
"""Nodes up to which everybody masks with everybody."""
COLLUDING, GONE = 10, 3
"""One in so many nodes may collude with the server in a large cohort, or be gone."""
UNSAFE, LOST = 2.0**-40, 2.0**-20
"""Probabilities that a graph is not safe, or that a round cannot be opened."""


class Graph(NamedTuple):
    """The holders of every node, in order, the node itself among them."""

    holders: dict[int, tuple[int, ...]]
    threshold: int

    def neighbors(self, node: int, among: Iterable[int]) -> list[int]:
        """The neighbors of a node that are among these nodes, in order."""
        some = set(among) - {node}
        return [other for other in self.holders[node] if other in some]


def least_of(nodes: int) -> int:
    """Two thirds of so many nodes, without which nothing is opened."""
    return -(-2 * nodes // 3)


def most_colluding(nodes: int) -> int:
    """Of so many nodes, how many may collude with a server that lies and gain nothing.

    In a complete graph c nodes that have any view make two thresholds t together with
    n - c honest ones if 2 (t - c) <= n - c, that is c >= 2 t - n, which is n / 3 or
    more: 3 c + 1 nodes are enough.
    """
    return (nodes - 1) // 3 if nodes <= COMPLETE else nodes // COLLUDING


def graph_of(members: Sequence[int], seed: bytes) -> Graph:
    """The graph of a cohort; ``seed`` puts large ones in their order."""
    degree, threshold = degree_and_threshold(len(members))
    everybody = tuple(sorted(members))
    if degree == len(members) - 1:
        return Graph(dict.fromkeys(everybody, everybody), threshold)

    def place(node: int) -> bytes:
        return hashlib.sha256(seed + str(node).encode()).digest()

    circle, half = sorted(everybody, key=place), degree // 2
    holders = {
        node: tuple(
            sorted(circle[(at + step) % len(circle)] for step in range(-half, half + 1))
        )
        for at, node in enumerate(circle)
    }
    return Graph(holders, threshold)


def left_out(
    graph: Graph, answered: Collection[int], complaints: Collection[tuple[int, int]]
) -> list[int]:
    """Whom a sum must do without, so that enough holders can open all boxes.

    Of a client and a holder for whom its box does not open, either may have spoiled
    it. Who is in most such pairs is left out first. A few who lie about many others
    are therefore left out themselves, or nobody is.

    Args:
        graph: of the attempt.
        answered: who is there to open the sum.
        complaints: such pairs.
    """
    rest, found = set(complaints), []

    def short(client: int) -> bool:
        there = [one for one in graph.holders[client] if one in answered]
        good = [holder for holder in there if (client, holder) not in rest]
        return len(good) < graph.threshold

    while any(short(owner) for owner, _ in rest):
        counted = Counter(one for pair in sorted(rest) for one in pair)
        found.append(counted.most_common(1)[0][0])
        rest = {pair for pair in rest if found[-1] not in pair}
    return found


@lru_cache(maxsize=64)
def degree_and_threshold(nodes: int) -> tuple[int, int]:
    """The number of neighbors of a node, and the threshold."""
    complete = nodes - 1, least_of(nodes)
    if nodes <= COMPLETE:
        return complete
    colluding, left = most_colluding(nodes), nodes - nodes // GONE
    others, threshold = nodes - 1, 2
    for degree in range(2, others, 2):
        # A threshold that was too small for fewer holders is too small for more.
        while _tail(others, colluding, degree, 2 * threshold - degree - 1) > (
            UNSAFE / nodes
        ):
            threshold += 1
        # The node itself is one of its holders that are left.
        enough = _tail(others, left - 1, degree, threshold - 1)
        if threshold <= degree and 1 - enough <= LOST / nodes:
            return degree, threshold
    return complete


def _tail(all: int, marked: int, drawn: int, least: int) -> float:
    """The probability that so many of some that are drawn are marked, or more."""
    if least <= 0:
        return 1.0
    ways = sum(
        comb(marked, n) * comb(all - marked, drawn - n)
        for n in range(least, min(marked, drawn) + 1)
    )
    return ways / comb(all, drawn)


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


SHARES_BYTES = 2 * masks.SHARE_BYTES + OVERHEAD
"""Of a box with a share of b_i and one of e_i."""
KEY_SHARE_BYTES = masks.SHARE_BYTES + OVERHEAD


class Shared(NamedTuple):
    """What a node sends when it shares; holders in order, without the node itself."""

    boxes: list[bytes]
    seeds: bytes
    nonce: str
    """Of this node in this attempt; public."""


class Opened(NamedTuple):
    """What a node sends when it opens; holders that answered in order, without it."""

    tokens: list[bytes]
    key_shares: list[bytes]
    own: bytes
    """Its own share of r_i, which needs no token."""
    box: bytes
    """Under r_i: its share of b_j or e_j of every client j that it holds shares of."""
    damaged: list[int]
    """Clients whose boxes for this node do not open; ``box`` has zeros of them."""


def public_key(private: X25519PrivateKey) -> bytes:
    """The public half of a key."""
    return private.public_key().public_bytes_raw()


def pair_mask_seed(pair: bytes, view: bytes) -> bytes:
    """The seed of the mask of two nodes, from k_ij and the view of both."""
    return derive(pair, "pair mask", view)


def self_mask_seed(own: bytes, view: bytes) -> bytes:
    """The seed of a node's own mask, from b_i and its view."""
    return derive(own, "self mask", view)


def token_view(view: bytes, answered: Sequence[int]) -> bytes:
    """Names a view and those whose answers have arrived: U2."""
    return digest_of(view.hex(), list(answered))


class Party:
    """One node in one attempt.

    Args:
        attempt: with the keys of the node's own roster.
        client: of this node.
        private: its key.
        secret: 32 bytes of this node alone, on which all that it sends depends.
    """

    def __init__(
        self, attempt: Attempt, client: int, private: X25519PrivateKey, secret: bytes
    ):
        self.attempt, self.client = attempt, client
        self._private, self._secret = private, secret
        self._agreed: dict[int, bytes] = {}
        self.nonce = self._own("nonce").hex()

    def share(self) -> Shared:
        """Shares for the holders, and the seeds of all pairs."""
        graph = self.attempt.graph
        holders = graph.holders[self.client]
        selves, envelopes = self._shares("self"), self._shares("envelope")
        others = graph.neighbors(self.client, holders)
        boxes = [
            seal(
                self._pair_key(other, "shares", self.client, other),
                selves[other + 1] + envelopes[other + 1],
            )
            for other in others
        ]
        seeds = b"".join(self._pair(other) for other in others)
        return Shared(boxes, seal(self._own("envelope"), seeds), self.nonce)

    def mask(self, numbers: np.ndarray, view: View) -> np.ndarray:
        """These whole numbers with the masks of this view."""
        if view.nonces.get(self.client) != self.nonce:
            raise SecureError("message: this node did not share so in this attempt")
        total, digest = numbers.copy(), view.digest(self.attempt.digest)
        add_mask(total, self_mask_seed(self._own("self"), digest), +1)
        for other in self.attempt.graph.neighbors(self.client, view.nonces):
            sign = +1 if self.client < other else -1
            add_mask(total, pair_mask_seed(self._pair(other), digest), sign)
        return total

    def open(
        self, view: View, answered: Sequence[int], boxes: Mapping[int, bytes]
    ) -> Opened:
        """Gives its shares: of b_j of those who answered, of e_j of the others.

        ``boxes`` are those with the shares for this node, by the client they are of. Of
        one that does not open it gives nothing, and opens the others: whoever spoiled
        it, a node or the server, has one share less.
        """
        own, graph, size = self.client, self.attempt.graph, masks.SHARE_BYTES
        found = {own: self._shares("self")[own + 1]}
        damaged = self.find_damaged(boxes)
        for other in graph.neighbors(own, view.nonces):
            both = bytes(2 * size) if other in damaged else self._read_box(other, boxes)
            found[other] = both[:size] if other in answered else both[size:]
        agreed = token_view(view.digest(self.attempt.digest), answered)
        key = derive(self._secret, "answer", agreed)
        others = graph.neighbors(own, answered)
        places = [other + 1 for other in (*others, own)]
        seed = derive(self._secret, "answer shares", agreed)
        shares = masks.split(key, graph.threshold, places, seed)
        return Opened(
            tokens=[self._token(agreed, own, other) for other in others],
            key_shares=[
                seal(self._token(agreed, other, own), shares[other + 1])
                for other in others
            ],
            own=shares[own + 1],
            box=seal(key, b"".join(found[client] for client in sorted(found))),
            damaged=damaged,
        )

    def find_damaged(self, boxes: Mapping[int, bytes]) -> list[int]:
        """The clients whose boxes with shares for this node do not open."""
        found = []
        for other in sorted(boxes):
            try:
                self._read_box(other, boxes)
            except SecureError:
                found.append(other)
        return found

    def _read_box(self, other: int, boxes: Mapping[int, bytes]) -> bytes:
        """The shares that another node has for this one: of b_j, then of e_j."""
        both = opened(self._pair_key(other, "shares", other, self.client), boxes[other])
        if len(both) != 2 * masks.SHARE_BYTES:
            raise SecureError("a box of another node has no two shares")
        return both

    def _own(self, purpose: str) -> bytes:
        """b_i, e_i and what else is this node's alone."""
        return derive(self._secret, purpose, self.attempt.digest)

    def _shares(self, purpose: str) -> dict[int, bytes]:
        graph, seed = self.attempt.graph, self._own(f"shares of {purpose}")
        places = [holder + 1 for holder in graph.holders[self.client]]
        return masks.split(self._own(purpose), graph.threshold, places, seed)

    def _pair(self, other: int) -> bytes:
        """k_ij, the same for both nodes."""
        return self._pair_key(other, "pair")

    def _token(self, agreed: bytes, giver: int, owner: int) -> bytes:
        """Opens the giver's share of the owner's key."""
        other = owner if giver == self.client else giver
        return self._pair_key(other, "token", agreed, giver, owner)

    def _pair_key(self, other: int, purpose: str, *about: bytes | int) -> bytes:
        if other not in self._agreed:
            key = X25519PublicKey.from_public_bytes(self.attempt.keys[other])
            self._agreed[other] = self._private.exchange(key)
        return derive(self._agreed[other], purpose, self.attempt.digest, *about)


def unmask(
    total: np.ndarray,
    graph: Graph,
    view: bytes,
    shared: Mapping[int, bytes],
    answered: Sequence[int],
    openings: Mapping[int, Opened],
) -> np.ndarray:
    """The sum of the answers, from the sum of the masked ones.

    Args:
        total: the sum of the masked answers.
        graph: of the attempt.
        view: the digest of the view that all nodes have.
        shared: the box with the seeds of pairs, of each client that handed out shares.
        answered: the clients whose masked answers are in the sum, in order.
        openings: what nodes opened, by client.

    Raises:
        SecureError: too few nodes opened.
    """
    result, readable = total.copy(), _readable(graph, shared, answered, openings)
    for client in sorted(shared):
        found = {
            holder + 1: readable[holder][client]
            for holder in graph.holders[client]
            if client in readable.get(holder, {})
        }
        try:
            secret = masks.combine(found, graph.threshold)
        except SecureError as error:
            raise SecureError(f"client {client}: {error}") from None
        if client in answered:
            add_mask(result, self_mask_seed(secret, view), -1)
            continue
        seeds = unseal(secret, shared[client])
        for at, other in enumerate(graph.neighbors(client, graph.holders[client])):
            if other in answered:
                pair = seeds[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                sign = -1 if other < client else +1
                add_mask(result, pair_mask_seed(pair, view), sign)
    return result


def _readable(
    graph: Graph,
    shared: Mapping[int, bytes],
    answered: Sequence[int],
    openings: Mapping[int, Opened],
) -> dict[int, dict[int, bytes]]:
    """The shares that nodes gave, by node and client.

    What a node gave is left out where too few others have its view, or where it does
    not open.
    """
    tokens = {
        (giver, owner): token
        for giver, one in openings.items()
        for owner, token in zip(
            graph.neighbors(giver, answered), one.tokens, strict=True
        )
    }
    found, size = {}, masks.SHARE_BYTES
    for owner, one in openings.items():
        shares = {owner + 1: one.own}
        others = graph.neighbors(owner, answered)
        for giver, box in zip(others, one.key_shares, strict=True):
            # The token of a node with another view does not open it.
            with suppress(KeyError, SecureError):
                shares[giver + 1] = unseal(tokens[giver, owner], box)
        try:
            content = unseal(masks.combine(shares, graph.threshold), one.box)
        except SecureError:
            continue
        clients = sorted((owner, *graph.neighbors(owner, shared)))
        found[owner] = {
            client: content[at * size : (at + 1) * size]
            for at, client in enumerate(clients)
            if client not in one.damaged
        }
    return found

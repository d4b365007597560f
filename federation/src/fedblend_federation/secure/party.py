# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A node's steps in an attempt at a secure sum: it shares, masks and opens.

Nodes i and j have a seed k_ij that nobody else can compute, by X25519. In an attempt a
node i also draws a seed b_i and a key e_i::

    share   sends its holders shares of b_i and of e_i, in boxes for each, and all k_ij
            in a box under e_i
    mask    sends x_i + mask(b_i) + sum of mask(k_ij) over j > i - the same over j < i
    open    gives its share of b_j where x_j has arrived, that of e_j where it has not

The masks of pairs cancel in a sum. Who has b_i of all who answered, and e_i of all who
did not, removes the other masks; who had both of one client would have its x_i.

An honest node opens one view of a round, ever. What it gives is in a box under a key
r_i, and r_i is shared among its holders: a holder's token, which depends on the
holder's own view, opens one share of r_i. A server that tells nodes different things
therefore cannot read what they give.

Boxes that do not open, by a fault of the node that made them or of the server that
carried them, are named, and what the others hold may be enough. A server that spoils
boxes gains nothing: of each it gets one share less, of the view that the node opens.
It may then leave honest nodes out of another attempt, but members of an attempt are
the server's choice anyway: a node that is asked to share, to answer or to open checks
every set for itself, whatever it was told of boxes, and opens one view of a round.

Reference: Bonawitz et al., "Practical secure aggregation for privacy-preserving machine
learning", CCS 2017. Where this differs from the paper: keys are exchanged once, seeds
of pairs are recovered and never a node's key, masks depend on the message of the round,
and tokens take the place of a round in which views are compared.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)

from fedblend_federation.secure import shamir
from fedblend_federation.secure.attempt import Attempt, View, digest_of
from fedblend_federation.secure.masks import (
    OVERHEAD,
    SecureError,
    add_mask,
    derive,
    seal,
)
from fedblend_federation.secure.masks import unseal as opened

SHARES_BYTES = 2 * shamir.SHARE_BYTES + OVERHEAD
"""Of a box with a share of b_i and one of e_i."""
KEY_SHARE_BYTES = shamir.SHARE_BYTES + OVERHEAD


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
                self._with(other, "shares", self.client, other),
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
        own, graph, size = self.client, self.attempt.graph, shamir.SHARE_BYTES
        found = {own: self._shares("self")[own + 1]}
        damaged = self.damaged(boxes)
        for other in graph.neighbors(own, view.nonces):
            both = bytes(2 * size) if other in damaged else self._held(other, boxes)
            found[other] = both[:size] if other in answered else both[size:]
        agreed = token_view(view.digest(self.attempt.digest), answered)
        key = derive(self._secret, "answer", agreed)
        others = graph.neighbors(own, answered)
        places = [other + 1 for other in (*others, own)]
        seed = derive(self._secret, "answer shares", agreed)
        shares = shamir.split(key, graph.threshold, places, seed)
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

    def damaged(self, boxes: Mapping[int, bytes]) -> list[int]:
        """The clients whose boxes with shares for this node do not open."""
        found = []
        for other in sorted(boxes):
            try:
                self._held(other, boxes)
            except SecureError:
                found.append(other)
        return found

    def _held(self, other: int, boxes: Mapping[int, bytes]) -> bytes:
        """The shares that another node has for this one: of b_j, then of e_j."""
        both = opened(self._with(other, "shares", other, self.client), boxes[other])
        if len(both) != 2 * shamir.SHARE_BYTES:
            raise SecureError("a box of another node has no two shares")
        return both

    def _own(self, purpose: str) -> bytes:
        """b_i, e_i and what else is this node's alone."""
        return derive(self._secret, purpose, self.attempt.digest)

    def _shares(self, purpose: str) -> dict[int, bytes]:
        graph, seed = self.attempt.graph, self._own(f"shares of {purpose}")
        places = [holder + 1 for holder in graph.holders[self.client]]
        return shamir.split(self._own(purpose), graph.threshold, places, seed)

    def _pair(self, other: int) -> bytes:
        """k_ij, the same for both nodes."""
        return self._with(other, "pair")

    def _token(self, agreed: bytes, giver: int, owner: int) -> bytes:
        """Opens the giver's share of the owner's key."""
        other = owner if giver == self.client else giver
        return self._with(other, "token", agreed, giver, owner)

    def _with(self, other: int, purpose: str, *about: bytes | int) -> bytes:
        if other not in self._agreed:
            key = X25519PublicKey.from_public_bytes(self.attempt.keys[other])
            self._agreed[other] = self._private.exchange(key)
        return derive(self._agreed[other], purpose, self.attempt.digest, *about)

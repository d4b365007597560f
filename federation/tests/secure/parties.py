# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Nodes of an attempt at a secure sum, without messages and disks."""

import secrets

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedblend_federation.secure.flatten import FixedPoint
from fedblend_federation.secure.session import Attempt, Party, View, public_key, unmask

SIZE = 50


class Parties:
    """All of them, and the answers that they mask."""

    def __init__(self, count: int, bits: int = 64, size: int = SIZE):
        self.members = [3 * n + 2 for n in range(count)]
        self.private = {c: X25519PrivateKey.generate() for c in self.members}
        keys = {c: public_key(key) for c, key in self.private.items()}
        encoding = FixedPoint(bits, 8.0, count)
        self.attempt = Attempt("trial", 4, 0, keys, encoding, "the terms")
        self.parties = {
            c: Party(self.attempt, c, self.private[c], secrets.token_bytes(32))
            for c in self.members
        }
        rng, dtype = np.random.default_rng(count), self.attempt.fixed_point.dtype
        self.answers = {
            c: rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
            for c in self.members
        }

    def view(self, sharing) -> View:
        """That of honest nodes, if these have handed out shares."""
        nonces = {c: self.parties[c].nonce for c in sharing}
        return View(nonces, "the model", 1.0)

    def boxes_for(self, holder: int, shared: dict) -> dict[int, bytes]:
        """The boxes with the shares for one holder."""
        graph = self.attempt.graph
        return {
            c: shared[c].boxes[graph.neighbors(c, graph.holders[c]).index(holder)]
            for c in graph.neighbors(holder, shared)
        }

    def run(self, sharing, answering, opening) -> np.ndarray:
        """The sum that the server gets if these take part in the three steps."""
        shared = {c: self.parties[c].share() for c in sharing}
        view = self.view(sharing)
        masked = [self.parties[c].mask(self.answers[c], view) for c in answering]
        openings = {
            c: self.parties[c].open(view, answering, self.boxes_for(c, shared))
            for c in opening
        }
        return unmask(
            np.sum(masked, axis=0, dtype=masked[0].dtype),
            self.attempt.graph,
            view.digest(self.attempt.digest),
            {c: one.seeds for c, one in shared.items()},
            answering,
            openings,
        )

    def sum(self, some) -> np.ndarray:
        """The sum without masks."""
        wide = [self.answers[c] for c in some]
        return np.add.reduce(wide, dtype=wide[0].dtype)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What of a client's answer is summed, as one vector of numbers.

Ups are means by contract: the server's half gets the mean of what ``decode`` makes of
them. A node therefore decodes its own up and masks the numbers that come out. Where all
clients of a round send the same entries, it masks these alone, and the server decodes
their sum.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.compress.sparse import Entries
from fedblend.core import (
    Algorithm,
    ClientId,
    Key,
    PyTree,
    Quote,
    Ragged,
    SharedKey,
    is_special,
)
from fedblend.simulation.io.serialize import arrived, named_leaves, traveling

APART = {
    Entries: "entries of its own choice (top_k, rand_k with masks of its own)",
    SharedKey: "entries of its own draw (rand_k with masks of its own)",
    ClientId: "entries that few others send (perm_k, dealt masks)",
    Ragged: "as many numbers as it likes",
}
"""What in an up makes a sum of some entries one of few clients, in words."""
ALLOWED = "whole updates, quantizers, rand_k with one mask for all clients"


def refusal(up: PyTree, request: PyTree) -> str | None:
    """Why the answers of an algorithm cannot be summed unseen, in one line, or None.

    Args:
        up: shapes of a client's answer.
        request: shapes of what a client asks for.
    """
    if jax.tree.leaves(request):
        return (
            "federation.secure: clients of this algorithm ask for parts of the message "
            "([select], agnostic), which tells them apart; allowed: the same message "
            "for all"
        )
    for leaf in jax.tree.leaves(up, is_leaf=_is_apart):
        for kind, what in APART.items():
            if isinstance(leaf, kind):
                return (
                    f"federation.secure: each client sends {what}, of which a sum "
                    f"shows single clients; allowed: {ALLOWED}"
                )
    return None


def _is_apart(node) -> bool:
    return is_special(node) or isinstance(node, Entries)


class Summand:
    """The numbers of an answer that are summed.

    Args:
        algorithm: whose answers.
        up: shapes of an answer.
    """

    def __init__(self, algorithm: Algorithm, up: PyTree):
        self.algorithm, self.up = algorithm, up
        self.decoded = jax.eval_shape(algorithm.decode, up)
        sent = jax.tree.leaves(_sent(up))
        floats = all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in sent)
        whole = trees.size(self.decoded)
        self.as_sent = floats and sum(leaf.size for leaf in sent) < whole
        self.size = sum(leaf.size for leaf in sent) if self.as_sent else whole

    def vector(self, up: PyTree) -> np.ndarray:
        """The numbers of one answer."""
        own = traveling(up) if self.as_sent else self.algorithm.decode(up)
        return as_vector(own)

    def total(self, vector: np.ndarray, key: Key, down: PyTree) -> PyTree:
        """The sum of decoded answers, from the sum of their numbers.

        ``down`` is the message of the round, which answers may quote.
        """
        if not self.as_sent:
            return as_tree_like(vector, self.decoded)
        sums = as_tree_like(vector, _sent(self.up))
        return self.algorithm.decode(arrived(named_leaves(sums), self.up, key, 0, down))


def _sent(up: PyTree) -> PyTree:
    """The shapes of what travels; all of it, but for quotes."""
    return jax.tree.map(
        lambda leaf: () if isinstance(leaf, Quote) else leaf, up, is_leaf=is_special
    )


def as_vector(tree: PyTree) -> np.ndarray:
    """All numbers of a tree, as float64."""
    leaves = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def as_tree_like(vector: np.ndarray, shapes: PyTree) -> PyTree:
    """The numbers in a tree of these shapes, in float32 at least."""
    leaves, structure = jax.tree.flatten(shapes)
    edges = np.cumsum([0, *(leaf.size for leaf in leaves)])
    found = [
        np.asarray(
            vector[start:end].reshape(leaf.shape),
            jnp.promote_types(leaf.dtype, jnp.float32),
        )
        for leaf, start, end in zip(leaves, edges, edges[1:], strict=False)
    ]
    return jax.tree.unflatten(structure, found)

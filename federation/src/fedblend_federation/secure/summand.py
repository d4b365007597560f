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
from jax.interpreters.partial_eval import dce_jaxpr

from fedblend import trees
from fedblend.compress.sparse import Entries
from fedblend.core import Algorithm, PyTree, Ragged, Sender
from fedblend.simulation.io.serialize import arrived, named_leaves, traveling

APART = {
    Entries: "entries of its own choice (top_k, rand_k with masks of its own)",
    Ragged: "as many numbers as it likes",
}
"""What in an up makes a sum of some entries one of few clients, in words."""
OF_SENDER = {
    "key": "entries of its own draw (rand_k with masks of its own)",
    "id": "entries that few others send (perm_k, dealt masks)",
}
"""Likewise, if ``decode`` depends on this field of the sender."""
ALLOWED = "whole updates, quantizers, rand_k with one mask for all clients"


def refusal(
    algorithm: Algorithm, up: PyTree, request: PyTree, down: PyTree
) -> str | None:
    """Why the answers of an algorithm cannot be summed unseen, in one line, or None.

    Args:
        algorithm: whose answers.
        up: shapes of a client's answer.
        request: shapes of what a client asks for.
        down: shapes of the server's message.
    """
    if jax.tree.leaves(request):
        return (
            "federation.secure: clients of this algorithm ask for parts of the message "
            "([select], agnostic), which tells them apart; allowed: the same message "
            "for all"
        )
    nodes = jax.tree.leaves(up, is_leaf=lambda node: isinstance(node, tuple(APART)))
    found = [APART[type(node)] for node in nodes if type(node) in APART]
    found += [OF_SENDER[field] for field in _read_of_sender(algorithm, up, down)]
    if not found:
        return None
    return (
        f"federation.secure: each client sends {found[0]}, of which a sum "
        f"shows single clients; allowed: {ALLOWED}"
    )


def _read_of_sender(algorithm: Algorithm, up: PyTree, down: PyTree) -> list[str]:
    """The fields of ``OF_SENDER`` on which a decoded answer depends."""

    def decoded(key, id, up, down):
        return algorithm.wire.decode(up, Sender(id, key, down))

    key = jax.eval_shape(lambda: jax.random.key(0))
    id = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(decoded)(key, id, up, down).jaxpr
    _, used = dce_jaxpr(program, [True] * len(program.outvars))
    return [field for field, read in zip(OF_SENDER, used, strict=False) if read]


class Summand:
    """The numbers of an answer that are summed.

    Args:
        algorithm: whose answers.
        up: shapes of an answer.
        down: the server's message of the round, or its shapes.
    """

    def __init__(self, algorithm: Algorithm, up: PyTree, down: PyTree):
        self.algorithm, self.up = algorithm, up
        self.decoded = jax.eval_shape(self._decode, up, down)
        sent = jax.tree.leaves(up)
        floats = all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in sent)
        whole = trees.size(self.decoded)
        self.as_sent = floats and sum(leaf.size for leaf in sent) < whole
        self.size = sum(leaf.size for leaf in sent) if self.as_sent else whole

    def _decode(self, up: PyTree, down: PyTree) -> PyTree:
        """The decoded answer, which does not depend on who sent it; see ``refusal``."""
        anybody = Sender(jnp.zeros((), jnp.int32), jax.random.key(0), down)
        return self.algorithm.wire.decode(up, anybody)

    def vector(self, up: PyTree, down: PyTree) -> np.ndarray:
        """The numbers of one answer to this message."""
        return as_vector(traveling(up) if self.as_sent else self._decode(up, down))

    def total(self, vector: np.ndarray, down: PyTree) -> PyTree:
        """The sum of decoded answers to this message, from the sum of their numbers."""
        if not self.as_sent:
            return as_tree_like(vector, self.decoded)
        sums = as_tree_like(vector, self.up)
        return self._decode(arrived(named_leaves(sums), self.up), down)


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

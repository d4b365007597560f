# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""An answer as one vector of whole numbers, so that masks cancel exactly in a sum.

The server's half of an algorithm gets the mean of what ``decode`` makes of ups. A node
therefore decodes its own up and masks the numbers that come out. Where all clients of a
round send the same entries, it masks these alone, and the server decodes their sum.

A number x with weight w <= 1 becomes ``round(2^f * clip(w * x))`` modulo 2^32 or 2^64.
Clip bounds by C in absolute value; f is such that the sum of all n clients fits:
``n * C * 2^f < 2^(bits - 1)``. The decoded sum differs by at most ``n * 2^-(f + 1)``
from that of the clipped numbers, apart from the rounding of float64.

Weights are coarse: a server that knows the weights, and makes numbers of which it knows
all but the sign, would read the signs of all clients from a sum in which each of them
has another weight.
"""

from math import frexp
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from fedblend import trees
from fedblend.compress.sparse import Entries
from fedblend.core import Algorithm, PyTree, Ragged, Sender
from fedblend.simulation.serialize import complete_message, name_leaves, traveling


class FixedPoint(NamedTuple):
    """An encoding for sums over so many clients."""

    bits: int
    """Of a whole number: 32 or 64."""
    clip: float
    """Largest absolute value of a client's number."""
    clients: int

    @property
    def dtype(self) -> np.dtype:
        """That of encoded numbers."""
        return np.dtype(np.uint32 if self.bits == 32 else np.uint64)

    @property
    def fraction_bits(self) -> int:
        """f; negative where not even whole numbers have room."""
        # Each of up to 2**15 clients may round up by a half.
        _, exponent = frexp(self.clients * self.clip * (1 + 2.0**-16))
        return self.bits - 1 - exponent

    @property
    def error(self) -> float:
        """The largest error of a sum of clipped numbers."""
        return self.clients * 2.0 ** -(self.fraction_bits + 1)

    def encode(self, values: np.ndarray, weight: float) -> np.ndarray:
        """A client's numbers, weighted and clipped; the weight is at most 1."""
        clipped = np.clip(values * weight, -self.clip, self.clip)
        whole = np.rint(clipped * 2.0**self.fraction_bits)
        return whole.astype(np.int64).astype(self.dtype)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """The sum of encoded numbers, as float64."""
        signed = total.view(np.int32 if self.bits == 32 else np.int64)
        return signed.astype(np.float64) * 2.0**-self.fraction_bits

    def count_clipped(self, values: np.ndarray, weight: float) -> int:
        """How many of a client's numbers are clipped, or no numbers."""
        return values.size - int((np.abs(values * weight) <= self.clip).sum())


def coarse(weights: np.ndarray) -> np.ndarray:
    """Each weight rounded up to a power of two.

    >>> coarse(np.array([0.0, 1.0, 40.0, 64.0])).tolist()
    [0.0, 1.0, 64.0, 64.0]
    """
    mantissa, exponent = np.frexp(weights)
    return np.ldexp(np.where(mantissa > 0.5, 1.0, mantissa), exponent)


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
            "(agnostic), which tells them apart; allowed: the same message "
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

    def decode(key, id, up, down):
        return algorithm.wire.decode(up, Sender(id, key, down))

    key = jax.eval_shape(lambda: jax.random.key(0))
    id = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(decode)(key, id, up, down).jaxpr
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
        self.as_sent = floats and trees.size(sent) < whole
        self.size = trees.size(sent) if self.as_sent else whole

    def _decode(self, up: PyTree, down: PyTree) -> PyTree:
        """The decoded answer, which does not depend on who sent it; see ``refusal``."""
        anybody = Sender(jnp.zeros((), jnp.int32), jax.random.key(0), down)
        return self.algorithm.wire.decode(up, anybody)

    def vector(self, up: PyTree, down: PyTree) -> np.ndarray:
        """The numbers of one answer to this message."""
        return flatten(traveling(up) if self.as_sent else self._decode(up, down))

    def total(self, vector: np.ndarray, down: PyTree) -> PyTree:
        """The sum of decoded answers to this message, from the sum of their numbers."""
        if not self.as_sent:
            return unflatten(vector, self.decoded)
        sums = unflatten(vector, self.up)
        return self._decode(complete_message(name_leaves(sums), self.up), down)


def flatten(tree: PyTree) -> np.ndarray:
    """All numbers of a tree, as float64."""
    leaves = [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def unflatten(vector: np.ndarray, shapes: PyTree) -> PyTree:
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

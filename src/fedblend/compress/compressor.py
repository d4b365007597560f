# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a compressor is, and how it is lifted from vectors to trees.

A compressor is a pair of pure functions on vectors of one length. Its payload is a tree
of arrays whose leaves are exactly what travels; bits are counted from them. Two kinds,
by what theory knows of them::

    unbiased      E C(x) = x,  E |C(x) - x|^2 <= omega |x|^2
    contractive   E |C(x) - x|^2 <= (1 - delta) |x|^2
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from fedblend import keys, trees
from fedblend.checks import Instance, Lengths
from fedblend.core import Key, PyTree, Shard, SharedKey


class Compressor(NamedTuple):
    """A compressor of vectors.

    compress     (vector, key, shard) -> payload; the shard tells who compresses, for
                 settings that differ by client, and is None at the server.
    decompress   (payload, dim) -> vector.
    omega        dim -> variance of an unbiased compressor (an array over clients where
                 they differ), None for a biased one.
    delta        dim -> contraction (likewise), None for one that has none; where it
                 comes out at 0 or below, the compressor does not contract.
    clients      how many it is for, where each has a part of its own and all must take
                 part with equal weights; None for any.
    """

    compress: Callable[[jax.Array, Key, Shard | None], PyTree]
    decompress: Callable[[PyTree, int], jax.Array]
    omega: Callable[[int], Any] | None = None
    delta: Callable[[int], Any] | None = None
    name: str = ""
    clients: int | None = None
    lengths: Lengths = ()
    """Of its settings that are arrays over clients; see ``checks``."""


COMPRESSOR = Instance(Compressor, "a Compressor")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("payload",),
    meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A tree as its payload; the layout is known to both sides and does not travel."""

    payload: PyTree
    layout: trees.Layout


def encode(
    compressor: Compressor, tree: PyTree, key: Key, shard: Shard | None, purpose: str
) -> Encoded:
    """Compress a tree as one long vector.

    The compressor draws from ``keys.named(key, purpose)``; what it draws from a key
    that both sides know is marked with the purpose, so that the receiver can do so too.
    """
    vector, layout = trees.ravel(tree)
    payload = compressor.compress(vector, keys.named(key, purpose), shard)

    def mark(leaf):
        if isinstance(leaf, SharedKey):
            return dataclasses.replace(leaf, purpose=purpose)
        return leaf

    payload = jax.tree.map(
        mark, payload, is_leaf=lambda leaf: isinstance(leaf, SharedKey)
    )
    return Encoded(payload, layout)


def decode(compressor: Compressor, encoded: Encoded) -> PyTree:
    """The tree that the receiver takes an encoded one for."""
    layout = encoded.layout
    vector = compressor.decompress(encoded.payload, layout.size)
    return trees.unravel(vector, layout)

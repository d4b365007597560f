# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors of vectors, compressed trees, and integers packed into bytes.

A compressor is a pair of pure functions on vectors of one length. Its payload is a tree
of arrays whose leaves are exactly what is sent; bits are counted from them. Theory
knows two kinds::

    unbiased      E C(x) = x,  E |C(x) - x|^2 <= omega |x|^2
    contractive   E |C(x) - x|^2 <= (1 - delta) |x|^2
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.checks import OF_TYPE, Instance, Lengths
from fedblend.core import Key, PyTree, Shard


class Compressor(NamedTuple):
    """A compressor of vectors.

    compress     (vector, key, shard) -> payload; the shard is that of the client that
                 compresses, for settings that differ by client, None at the server.
    decompress   (payload, dim, key, client) -> vector; the key that compressed and the
                 number of the client are known to the server, so that neither has to
                 be sent. Both are None where the server compressed.
    omega        dim -> variance of an unbiased compressor (an array over clients where
                 they differ), None for a biased one.
    delta        dim -> contraction (likewise), None for one that has none; at 0 or
                 below the compressor does not contract.
    clients      the number of clients it is for, where each client sends a part of its
                 own and all take part with equal weights; None for any number.
    """

    compress: Callable[[jax.Array, Key, Shard | None], PyTree]
    decompress: Callable[[PyTree, int, Key | None, jax.Array | None], jax.Array]
    omega: Callable[[int], Any] | None = None
    delta: Callable[[int], Any] | None = None
    name: str = ""
    clients: int | None = None
    masks: bool = False
    """It keeps entries at places that depend on the key alone, times 1 + omega."""
    lengths: Lengths = ()
    """Of its settings that are arrays over clients; see ``checks``."""


COMPRESSOR = Instance(Compressor, "a Compressor")
OF_TYPE[Compressor] = COMPRESSOR


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A compressed tree; both sides know the layout, which is not sent."""

    payload: PyTree
    layout: trees.Layout = dataclasses.field(metadata={"static": True})


def encode(
    compressor: Compressor, tree: PyTree, key: Key, shard: Shard | None, purpose: str
) -> Encoded:
    """Compress a tree as one long vector, drawing from ``keys.named(key, purpose)``."""
    vector, layout = trees.ravel(tree)
    return Encoded(compressor.compress(vector, keys.named(key, purpose), shard), layout)


def decode(
    compressor: Compressor,
    encoded: Encoded,
    key: Key | None = None,
    purpose: str = "",
    client: jax.Array | None = None,
) -> PyTree:
    """The tree that the receiver decodes.

    Args:
        compressor: that of ``encode``.
        encoded: what was sent.
        key: that of ``encode``, where the receiver knows it.
        purpose: likewise.
        client: the number of the client that sent it.
    """
    own = None if key is None else keys.named(key, purpose)
    layout = encoded.layout
    vector = compressor.decompress(encoded.payload, layout.size, own, client)
    return trees.unravel(vector, layout)


def width_of(largest: int) -> int:
    """The number of bits that hold the integers from 0 to ``largest``."""
    return max(int(largest).bit_length(), 1)


def pack(numbers: jax.Array, width: int) -> jax.Array:
    """Integers below ``2**width`` packed into bytes without gaps, highest bit first."""
    places = jnp.arange(width - 1, -1, -1, dtype=jnp.uint32)
    bits = (numbers.astype(jnp.uint32)[:, None] >> places[None, :]) & 1
    return jnp.packbits(bits.reshape(-1).astype(jnp.uint8))


def unpack(packed: jax.Array, count: int, width: int) -> jax.Array:
    """The ``count`` integers that ``pack`` packed."""
    bits = jnp.unpackbits(packed, count=count * width).reshape(count, width)
    places = jnp.arange(width - 1, -1, -1, dtype=jnp.uint32)
    return (bits.astype(jnp.uint32) << places[None, :]).sum(axis=1, dtype=jnp.uint32)

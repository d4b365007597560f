# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One mask for all clients of a round, so that their mean is as sparse as each of them.

The server sends a seed with every message, from which all clients draw the same
entries. What changes by the mean of their answers then changes at these entries alone,
and the server sends the entries of the change instead of the model. Only the first
message, and what a new client deploys, have the whole model.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.compress.compressor import Compressor, Encoded
from fedblend.compress.sparse import Entries
from fedblend.core import Key, PyTree, Ragged

NAME = "one mask"
"""Of the random keys, and of the part of a message that has the seed."""


class MaskedChange(NamedTuple):
    """How the shared model came about: its change, the seed of the entries, if any."""

    change: PyTree
    seed: jax.Array
    first: jax.Array


class Told(NamedTuple):
    """The shared model as a client receives it: entries, or all of it at first."""

    entries: Encoded
    whole: Ragged


def seed_of(key: Key) -> jax.Array:
    """The seed of a round's mask."""
    return jax.random.key_data(keys.named(key, NAME))


def at(compressor: Compressor, seed: jax.Array) -> Compressor:
    """The compressor with the places of this seed, which are not sent."""
    common = jax.random.wrap_key_data(seed)
    return compressor._replace(
        compress=lambda vector, key, shard: (
            compressor.compress(vector, common, shard).values
        ),
        decompress=lambda values, dim, key, client: compressor.decompress(
            Entries(values, ()), dim, common, None
        ),
    )


def unchanged(shared: PyTree) -> MaskedChange:
    """That of the first message."""
    seed, first = jnp.zeros(2, jnp.uint32), jnp.ones((), bool)
    return MaskedChange(trees.zeros_like(shared), seed, first)


def changed(change: PyTree, seed: jax.Array) -> MaskedChange:
    """That of a later message."""
    return MaskedChange(change, seed, jnp.zeros((), bool))


def told(compressor: Compressor, shared: PyTree, past: MaskedChange) -> Told:
    """The message: the entries of the change, which has no others; all at first."""
    vector, layout = trees.ravel(past.change)
    own, omega = at(compressor, past.seed), compressor.omega
    assert omega is not None
    # The compressor multiplies what it keeps by 1 + omega.
    common = jax.random.wrap_key_data(past.seed)
    values = own.compress(vector / (1 + omega(layout.size)), common, None)
    used = jnp.where(past.first, layout.size, 0).astype(jnp.int32)
    whole = jnp.where(past.first, trees.ravel(shared)[0], 0)
    return Told(Encoded(values, layout), Ragged(whole, used))


def received(
    compressor: Compressor, message: Told, before: PyTree, seed: jax.Array
) -> PyTree:
    """The shared model, by a client that knows what it was before the change."""
    entries, layout = message.entries, message.entries.layout
    change = at(compressor, seed).decompress(entries.payload, layout.size, None, None)
    after = trees.add(before, trees.unravel(change, layout))
    whole = trees.unravel(message.whole.buffer, layout)
    return trees.select(message.whole.used > 0, whole, after)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a shard: random batches, epochs in random order, everything at once."""

import dataclasses

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.core import Batch, ClientId, Key, PyTree, Shard


def draw(shard: Shard, key: Key, size: int | None) -> Batch:
    """``size`` rows drawn at random, with replacement; all rows if None."""
    if size is None:
        return everything(shard)
    return rows_at(shard, random_rows(shard, key, (size,)))


def random_rows(shard: Shard, key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Row numbers drawn at random, the same ones in every precision."""
    return jax.random.randint(key, shape, 0, shard.count, jnp.int32)


def rows_at(shard: Shard, index: jax.Array, mask: jax.Array | None = None) -> Batch:
    """The rows with these numbers, counted within the shard."""
    examples = jax.tree.map(jnp.asarray, shard.examples)
    return Batch(trees.take(examples, shard.start + index), mask)


def everything(shard: Shard) -> Batch:
    """All rows, in a window of ``capacity`` rows of which the first ``count`` count.

    A gather, because a slice that reaches past the end is silently moved.
    """
    index = jnp.arange(shard.capacity)
    return rows_at(
        shard, jnp.minimum(index, jnp.maximum(shard.count - 1, 0)), index < shard.count
    )


def epoch_order(shard: Shard, key: Key) -> jax.Array:
    """A random order of the shard's rows, in the first ``count`` of ``capacity``.

    The same one in every precision.
    """
    lots = jax.random.uniform(key, (shard.capacity,), jnp.float32)
    return jnp.argsort(jnp.where(jnp.arange(shard.capacity) < shard.count, lots, 2.0))


def part(shard: Shard, low: float | jax.Array, high: float | jax.Array) -> Shard:
    """The rows between two fractions of a client's own rows.

    Rows are shuffled when a federation is built, so a part is a fair sample. A small
    client's part may be empty.
    """
    first = jnp.floor(low * shard.count).astype(shard.start.dtype)
    last = jnp.floor(high * shard.count).astype(shard.start.dtype)
    return dataclasses.replace(shard, start=shard.start + first, count=last - first)


def per_client(values: PyTree, shard: Shard | ClientId) -> PyTree:
    """One client's entry of a setting: a scalar, or an array over all clients."""

    def pick(value):
        value = jnp.asarray(value, jnp.result_type(value))  # not weakly typed
        return value[shard.id] if value.ndim else value

    return jax.tree.map(pick, values)

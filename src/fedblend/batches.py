# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a shard: random batches, epochs in random order, everything at once."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from fedblend import trees
from fedblend.core import Batch, Drawn, Key, PyTree, Shard


def draw(shard: Shard, key: Key, size: int | None) -> Batch:
    """``size`` rows drawn at random, with replacement; all rows if None."""
    if size is None:
        return everything(shard)
    return rows_at(shard, random_rows(shard, key, (size,)))


def random_rows(shard: Shard, key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Row numbers drawn at random, the same ones in every precision."""
    return jax.random.randint(_add_salt(shard, key), shape, 0, shard.count, jnp.int32)


def random_rows_of(shard: Shard, key: Key, size: int, number: jax.Array) -> jax.Array:
    """``random_rows(shard, key, (steps, size))[number]``, and nothing else is drawn.

    A number that JAX draws is a hash of the key and its place in the array, where
    ``can_draw_alone``. Places count modulo 2^32.
    """
    places = number.astype(jnp.uint32) * size + jnp.arange(size, dtype=jnp.uint32)
    span = jnp.maximum(shard.count, 1).astype(jnp.uint32)

    def remainders(key: Key) -> jax.Array:
        counts = jnp.concatenate([jnp.zeros_like(places), places])
        high, low = threefry_2x32(jax.random.key_data(key), counts).reshape(2, size)
        return (high ^ low) % span

    # As in jax.random.randint: 64 random bits modulo the span, in 32-bit arithmetic.
    first, second = map(remainders, jax.random.split(_add_salt(shard, key)))
    factor = jnp.uint32(2**16) % span
    factor = factor * factor % span
    return ((first * factor + second) % span).astype(jnp.int32)


def can_draw_alone(key: Key) -> bool:
    """Whether ``random_rows_of`` draws what ``random_rows`` draws."""
    known = str(jax.random.key_impl(key)) == "threefry2x32"
    return known and bool(jax.config.jax_threefry_partitionable)  # pyright: ignore


def _add_salt(shard: Shard, key: Key) -> Key:
    """The key of a client's batches."""
    if shard.salt is None:
        return key
    return jax.random.fold_in(jax.random.fold_in(key, shard.salt[0]), shard.salt[1])


def rows_at(shard: Shard, index: jax.Array, mask: jax.Array | None = None) -> Batch:
    """The rows with these numbers, counted within the shard."""
    examples = jax.tree.map(jnp.asarray, shard.examples)
    drawn = Drawn(index, jnp.maximum(shard.count, 1)) if mask is None else None
    return Batch(trees.take(examples, shard.start + index), mask, drawn)


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
    lots = jax.random.uniform(_add_salt(shard, key), (shard.capacity,), jnp.float32)
    return jnp.argsort(jnp.where(jnp.arange(shard.capacity) < shard.count, lots, 2.0))


def part(shard: Shard, low: float | jax.Array, high: float | jax.Array) -> Shard:
    """The rows between two fractions of a client's own rows.

    Rows are shuffled when a federation is built, so a part is a fair sample. A small
    client's part may be empty.
    """
    first = jnp.floor(low * shard.count).astype(shard.start.dtype)
    last = jnp.floor(high * shard.count).astype(shard.start.dtype)
    return dataclasses.replace(shard, start=shard.start + first, count=last - first)


def client_entry(values: PyTree, shard: Shard) -> PyTree:
    """One client's entry of a setting: a scalar, or an array over all clients."""
    return entry_of(values, shard.id)


def entry_of(values: PyTree, client: jax.Array) -> PyTree:
    """The entry of the client of this number; see ``client_entry``."""

    def pick(value):
        value = jnp.asarray(value, jnp.result_type(value))  # not weakly typed
        return value[client] if value.ndim else value

    return jax.tree.map(pick, values)

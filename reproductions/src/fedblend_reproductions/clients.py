# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A function of every client's rows, computed once and outside of any run.

Clients are mapped in groups of ``chunk``, one group after the other, so that memory
does not grow with their number.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.checks import COUNT
from fedblend.core import PyTree, Shard
from fedblend.data.federated import Shards

CHUNK = 20
"""Clients of a group."""

Function = Callable[[Shard], PyTree]
"""From a client's rows to a tree of arrays."""


def map_clients(function: Function, shards: Shards, chunk: int = CHUNK) -> PyTree:
    """``function`` of every client's rows, stacked over clients.

    Args:
        function: from a shard to a tree of arrays.
        shards: the rows of all clients.
        chunk: clients of a group.
    """
    groups, _ = _groups(shards, chunk)
    values = jax.lax.map(jax.vmap(_place(function, shards)), groups)
    return jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: len(shards.counts)], values
    )


def mean_of_clients(function: Function, shards: Shards, chunk: int = CHUNK) -> PyTree:
    """The unweighted mean over clients of ``function`` of their rows.

    Arguments as for ``map_clients``; at most ``chunk`` values are in memory at once.
    """
    groups, present = _groups(shards, chunk)
    one = _place(function, shards)

    def add(total, group):
        places, shares = group
        values = jax.vmap(one)(places)
        part = jax.tree.map(
            lambda leaf: jnp.tensordot(shares.astype(leaf.dtype), leaf, 1), values
        )
        return trees.add(total, part), None

    shapes = jax.eval_shape(one, groups[0, 0])
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    shares = jnp.asarray(present / len(shards.counts))
    return jax.lax.scan(add, nothing, (groups, shares))[0]


def _place(function: Function, shards: Shards) -> Callable[[jax.Array], PyTree]:
    examples = jax.tree.map(jnp.asarray, shards.examples)

    def one(place):
        return function(Shard(examples, place[0], place[1], place[2], shards.capacity))

    return one


def _groups(shards: Shards, chunk: int) -> tuple[jax.Array, np.ndarray]:
    """Start, count and id of all clients, [groups, chunk, 3], and who is no padding."""
    COUNT("chunk", chunk)
    clients = len(shards.counts)
    chunk = min(chunk, clients)
    ids = np.pad(np.arange(clients), (0, -clients % chunk))
    present = np.arange(len(ids)) < clients
    places = np.stack([shards.starts[ids], shards.counts[ids], ids], axis=1)
    groups = jnp.asarray(places.reshape(-1, chunk, 3), jnp.int32)
    return groups, present.reshape(-1, chunk)

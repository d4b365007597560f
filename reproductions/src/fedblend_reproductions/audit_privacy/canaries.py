# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Canary clients: each sends its secret coin in a direction of its own.

Canaries take the place of an algorithm's clients, before any transform clips, encodes
or adds noise. Canary i owns a block B_i of the model's entries, chosen at random, and
sends in every round in which it takes part::

    delta_i <- LENGTH clip coin_i u_i        u_i = +-1/sqrt(|B_i|) on B_i, else 0

which clipping shortens to the clip. Clients that are no canaries send zeros. Blocks are
disjoint, so that no canary disturbs another one. There are as many blocks that nobody
owns, which show the noise alone.

The observer sits at the wrapped server, and sees every noisy mean from which that
server computes the next shared model. ``Seen`` has what the attack needs of it, its
products with all directions, and travels in the message to the clients.

Reference: Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar, "One-shot empirical privacy
estimation for federated learning", ICLR 2024, arXiv:2302.03098. Where this differs from
the paper: directions have disjoint entries, instead of being random in all of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, PyTree

LENGTH = 10.0
"""Of a canary's update, in units of the clip: without clipping it stands out."""
MOST_GROUPS = 4
"""Leaves are told apart, or groups of them where they are more."""
COINS = {"replace_one": (-1.0, 1.0), "zero_out": (0.0, 1.0)}
"""What a canary sends in either world: one of two opposite updates, or one or none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """Products of the last noisy mean with all directions, ``[groups, blocks]``."""

    products: jax.Array


class Directions(NamedTuple):
    """Of the vector of all entries that clients send: the block and group of each.

    ``entries`` are those of the directions, each at its own block.
    """

    block: np.ndarray
    group: np.ndarray
    entries: np.ndarray
    parts: np.ndarray
    """The share of each block's entries in each group, ``[groups, blocks]``."""


def directions(sizes: Sequence[int], canaries: int, seed: int) -> Directions:
    """Directions for so many canaries over leaves of these sizes.

    Args:
        sizes: entries of each leaf that clients send.
        canaries: the number of blocks with an owner; as many have none.
        seed: of blocks and signs.
    """
    draw, total = np.random.default_rng(seed), sum(sizes)
    block = draw.permutation(np.arange(total) % (2 * canaries))
    groups = min(len(sizes), MOST_GROUPS)
    group = np.repeat(np.arange(len(sizes)) * groups // len(sizes), sizes)
    counts = np.zeros((groups, 2 * canaries))
    np.add.at(counts, (group, block), 1)
    each = counts.sum(axis=0)
    entries = draw.choice([-1.0, 1.0], total) / np.sqrt(each)[block]
    return Directions(block, group, entries, counts / each)


def with_canaries(
    algorithm: Algorithm,
    *,
    params: PyTree,
    along: Directions,
    owners: np.ndarray,
    clip: float,
    adjacency: str,
) -> Algorithm:
    """The algorithm, whose clients send coins and whose message has what is seen.

    A client's state is its coin, drawn at enrollment. The server's half is that of the
    algorithm. Of the clients' half only the shape of updates is used: nothing trains.

    Args:
        algorithm: that of the configuration, before its transforms.
        params: shapes of the parameters.
        along: the directions.
        owners: the block of each client, -1 for those that are no canaries.
        clip: the norm to which updates are clipped.
        adjacency: "replace_one" or "zero_out".
    """
    groups, blocks = along.parts.shape
    off, on = COINS[adjacency]

    def joined(shard, key):
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        return algorithm.enroll(zeros, shard, key)

    def enroll(params, shard, key):
        del params
        join, _ = joined(shard, key)
        return trees.zeros_like(join), jnp.where(jax.random.bernoulli(key), on, off)

    def start(params, joins, central, key):
        down, server = algorithm.start(params, joins, central, key)
        nothing = Seen(jnp.zeros((groups, blocks), float))
        return down._replace(extra=down.extra | {"seen": nothing}), server

    def client(down, coin, shard, key):
        _, state = joined(shard, key)
        up, _ = algorithm.client(down, state, shard, key)
        _, layout = trees.ravel(up.delta)
        owned = jnp.asarray(along.block) == jnp.asarray(owners)[shard.id]
        unit = jnp.where(owned, jnp.asarray(along.entries, float), 0.0)
        delta = trees.unravel(LENGTH * clip * coin * unit, layout)
        return up._replace(delta=delta), coin

    def server(aggregate, down, server, central, key):
        after, server = algorithm.server(aggregate, down, server, central, key)
        noisy, _ = trees.ravel(aggregate.mean.delta)
        products = jax.ops.segment_sum(
            noisy.astype(float) * jnp.asarray(along.entries, float),
            jnp.asarray(along.group * blocks + along.block),
            groups * blocks,
        )
        seen = Seen(products.reshape(groups, blocks))
        return after._replace(extra=after.extra | {"seen": seen}), server

    return algorithm._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        wire=algorithm.wire._replace(ask=lambda coin, shard: ()),
        info=lambda coin: {},
    )

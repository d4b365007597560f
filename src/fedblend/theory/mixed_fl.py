# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL in numbers: how far two losses disagree, how noisy they are, how far a round
may go.

With weighted gradients ``g_f = w_f grad f_f`` and ``g_c = w_c grad f_c`` at a point::

    G^2 = |g_f|^2 / w_f + |g_c|^2 / w_c - |g_f + g_c|^2
    B^2 = (|g_f|^2 / w_f + |g_c|^2 / w_c) / |g_f + g_c|^2

G is 0 and B is 1 where both gradients are the same. Where they are large, parallel
training is slow. sigma^2 is the variance of a client's stochastic gradient around the
federated one, sigma_c^2 that of the server's around its own; one-way transfer suffers
from the latter, times the clients' steps.

A round's move, client rate x server rate x steps x merge rate, is bounded by ``limit``,
in the paper's rates: those of ``wrap.mixed``, whose clients do not weigh their
gradients, are w_f times those, and their limits w_f times these.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655, section
5 and appendix C.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.checks import FLAG, NOT_NEGATIVE, POSITIVE, gate, optional, words
from fedblend.core import Batch, Key, Loss, PyTree, Shard
from fedblend.data import map_clients
from fedblend.data.federated import FederatedData
from fedblend.losses import gradient
from fedblend.shards import draw, everything

_LIMITS = {
    ("one_way", True): 1 / 8,
    ("one_way", False): 1 / 18,
    ("two_way", True): 1 / 81,
    ("two_way", False): 1 / 24,
}
WAYS = words("parallel", "one_way", "two_way")
DRAWS = 20
"""Stochastic gradients that a variance is estimated from."""


class Disagreement(NamedTuple):
    """G^2 and B^2 at a point."""

    gap: jax.Array
    ratio: jax.Array


class Noise(NamedTuple):
    """sigma^2 and sigma_c^2 at a point, of unweighted gradients."""

    clients: jax.Array
    central: jax.Array


def disagreement(
    federated: PyTree, central: PyTree, weights: tuple[float, float]
) -> Disagreement:
    """G^2 and B^2.

    Args:
        federated: the gradient of f_f, without its weight.
        central: the gradient of f_c, without its weight.
        weights: w_f and w_c.

    >>> one = jnp.array([1.0, 0.0])
    >>> [float(value) for value in disagreement(one, one, (0.5, 0.5))]
    [0.0, 1.0]
    >>> [float(value) for value in disagreement(one, one[::-1], (0.5, 0.5))]
    [0.5, 2.0]
    """
    w_f, w_c = weights
    apart = w_f * trees.squared_norm(federated) + w_c * trees.squared_norm(central)
    mean = trees.add(trees.scale(w_f, federated), trees.scale(w_c, central))
    together = trees.squared_norm(mean)
    return Disagreement(apart - together, apart / together)


def federated_slope(
    loss: Loss,
    params: PyTree,
    federated_data: FederatedData,
    *,
    weights: np.ndarray | None = None,
    chunk: int = map_clients.CHUNK,
) -> PyTree:
    """The gradient of f_f, the weighted mean over clients of their training rows' mean.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        params: where.
        federated_data: whose training rows.
        weights: every client's; if None its rows, so that all rows count alike.
        chunk: clients whose gradients are taken side by side.
    """
    slope_at, train = gradient(loss), federated_data.train
    shares = jnp.asarray(federated_data.clients * _odds(weights, federated_data))

    def weighed(shard: Shard) -> PyTree:
        return trees.scale(shares[shard.id], slope_at(params, everything(shard)))

    return map_clients.mean(weighed, train, chunk)


def noise(
    loss: Loss,
    params: PyTree,
    federated_data: FederatedData,
    key: Key,
    *,
    batch_size: int | None,
    central: Shard,
    central_loss: Loss,
    central_batch: int | None,
    weights: np.ndarray | None = None,
    draws: int = DRAWS,
) -> Noise:
    """Variances of stochastic gradients, estimated from some draws.

    Args:
        loss: of the clients.
        params: where.
        federated_data: whose training rows; a draw is a client, at random by its
            weight, and a batch of it.
        key: of the draws.
        batch_size: of a client, None for all of its rows.
        central: the server's rows.
        central_loss: of the server.
        central_batch: of the server, None for all of its rows.
        weights: every client's, its rows if None.
        draws: how many of each.
    """
    own = [keys.named(key, what) for what in ("clients", "batches", "central")]
    train = federated_data.train
    odds = jnp.asarray(_odds(weights, federated_data))
    members = jax.random.choice(own[0], len(odds), (draws,), p=odds)
    starts, counts = jnp.asarray(train.starts), jnp.asarray(train.counts)

    def of_client(place, key):
        shard = Shard(
            train.examples, starts[place], counts[place], place, train.capacity
        )
        return gradient(loss)(params, _batch(shard, key, batch_size))

    def of_server(key):
        return gradient(central_loss)(params, _batch(central, key, central_batch))

    clients = jax.lax.map(
        lambda one: of_client(*one), (members, jax.random.split(own[1], draws))
    )
    server = jax.lax.map(of_server, jax.random.split(own[2], draws))
    around = federated_slope(loss, params, federated_data, weights=weights)
    middle = gradient(central_loss)(params, everything(central))
    return Noise(_spread(clients, around), _spread(server, middle))


def _batch(shard: Shard, key: Key, size: int | None) -> Batch:
    return everything(shard) if size is None else draw(shard, key, size)


def _odds(weights: np.ndarray | None, federated_data: FederatedData) -> np.ndarray:
    """Every client's part of the whole."""
    given = federated_data.train.counts if weights is None else weights
    return given / np.sum(given)


def _spread(slopes: PyTree, center: PyTree) -> jax.Array:
    gaps = jax.tree.map(lambda many, one: many - one[None], slopes, center)
    return jax.vmap(trees.squared_norm)(gaps).mean()


@gate(
    how=WAYS,
    smooth=POSITIVE,
    convex=FLAG,
    ratio=optional(NOT_NEGATIVE),
    strong=NOT_NEGATIVE,
)
def limit(
    how: str,
    smooth: float,
    *,
    convex: bool,
    ratio: float | None = None,
    strong: float = 0.0,
) -> float:
    """How far a round may go: rates times steps, on either side, in the paper's rates.

    Args:
        how: "parallel", "one_way" or "two_way".
        smooth: beta, of the unweighted losses, for one_way of the weighted ones.
        convex: whether the losses are.
        ratio: B^2 (parallel).
        strong: mu, where losses are strongly convex (two_way).

    >>> limit("parallel", 2.0, convex=True, ratio=1.0)
    0.041666666666666664
    """
    if how == "parallel":
        if ratio is None:
            raise ValueError("limit: parallel training needs ratio, that is B^2")
        return 1 / (6 * (1 + ratio) * smooth)
    far = _LIMITS[how, convex] / smooth
    return min(far, 1 / (15 * strong)) if how == "two_way" and strong > 0 else far

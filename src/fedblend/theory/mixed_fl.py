# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Theory of Mixed FL: disagreement of both losses, gradient noise, limits of a round.

With weighted gradients ``g_f = w_f grad f_f`` and ``g_c = w_c grad f_c`` at a point::

    G^2 = |g_f|^2 / w_f + |g_c|^2 / w_c - |g_f + g_c|^2
    B^2 = (|g_f|^2 / w_f + |g_c|^2 / w_c) / |g_f + g_c|^2

G is 0 and B is 1 where both gradients are the same; where G or B is large, parallel
training converges slowly. Near a minimum of the mixture B^2 has a denominator of almost
0, whatever the losses are: look at it where the gradient is large.

sigma^2 is the variance of a client's stochastic gradient around the federated gradient,
sigma_c^2 that of the server's around the central one. One-way transfer suffers from
sigma_c^2, times the clients' steps.

``limit`` bounds client rate x server rate x steps x merge rate of a round, in the
paper's rates. Clients of ``fb.mixed_fl`` descend f_f and not ``w_f f_f``: their rates,
and the limits of these, are w_f times those of the paper.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655, section
5 and appendix C.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.batches import draw, everything
from fedblend.checks import FLAG, NOT_NEGATIVE, POSITIVE, gate, optional, words
from fedblend.core import Batch, Key, Loss, PyTree, Shard
from fedblend.data import map_clients
from fedblend.data.federated import FederatedData
from fedblend.losses import gradient

DRAWS = 20
"""The number of stochastic gradients that a variance is estimated from."""


class Disagreement(NamedTuple):
    """G^2 and B^2 at a point, and |g_f + g_c|^2 there."""

    gap: jax.Array
    ratio: jax.Array
    mixed: jax.Array


class Noise(NamedTuple):
    """sigma^2 and sigma_c^2 at a point, of unweighted gradients."""

    clients: jax.Array
    central: jax.Array


def disagreement(
    federated: PyTree, central: PyTree, weights: tuple[float, float]
) -> Disagreement:
    """G^2 and B^2, and the squared norm of the mixture's gradient.

    Args:
        federated: the gradient of f_f, without its weight.
        central: the gradient of f_c, without its weight.
        weights: w_f and w_c.

    >>> one = jnp.array([1.0, 0.0])
    >>> [float(value) for value in disagreement(one, one, (0.5, 0.5))]
    [0.0, 1.0, 1.0]
    >>> [float(value) for value in disagreement(one, one[::-1], (0.5, 0.5))]
    [0.5, 2.0, 0.5]
    """
    w_f, w_c = weights
    both = w_f * trees.squared_norm(federated) + w_c * trees.squared_norm(central)
    mixed = trees.add(trees.scale(w_f, federated), trees.scale(w_c, central))
    of_mixture = trees.squared_norm(mixed)
    return Disagreement(both - of_mixture, both / of_mixture, of_mixture)


def federated_gradient(
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
        params: the point.
        federated_data: has the clients' training rows.
        weights: of the clients; None for their numbers of rows.
        chunk: number of clients whose gradients are computed at once.
    """
    gradient_at = gradient(loss)
    shares = jnp.asarray(federated_data.clients * _shares(weights, federated_data))

    def weighted(shard: Shard) -> PyTree:
        return trees.scale(shares[shard.id], gradient_at(params, everything(shard)))

    return map_clients.mean(weighted, federated_data.train, chunk)


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
        params: the point.
        federated_data: has the clients' training rows; a draw is a client, at random
            by its weight, and a batch of its rows.
        key: randomness of the draws.
        batch_size: of a client; None for all of its rows.
        central: the server's rows.
        central_loss: of the server.
        central_batch: batch size of the server; None for all of its rows.
        weights: of the clients; None for their numbers of rows.
        draws: number of draws of clients, and of batches of the server.
    """
    own = [keys.named(key, what) for what in ("clients", "batches", "central")]
    train = federated_data.train
    shares = jnp.asarray(_shares(weights, federated_data))
    members = jax.random.choice(own[0], len(shares), (draws,), p=shares)
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
    of_clients = federated_gradient(loss, params, federated_data, weights=weights)
    of_central = gradient(central_loss)(params, everything(central))
    return Noise(_variance(clients, of_clients), _variance(server, of_central))


def _batch(shard: Shard, key: Key, size: int | None) -> Batch:
    return everything(shard) if size is None else draw(shard, key, size)


def _shares(weights: np.ndarray | None, federated_data: FederatedData) -> np.ndarray:
    """The clients' weights, which sum to 1."""
    given = federated_data.train.counts if weights is None else weights
    return given / np.sum(given)


def _variance(gradients: PyTree, mean: PyTree) -> jax.Array:
    gaps = jax.tree.map(lambda many, one: many - one[None], gradients, mean)
    return jax.vmap(trees.squared_norm)(gaps).mean()


@gate(
    how=words("parallel", "one_way", "two_way"),
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
    """The largest product of rates and steps of a round, in the paper's rates.

    Args:
        how: "parallel", "one_way" or "two_way".
        smooth: beta of the unweighted losses; for one_way of the weighted ones.
        convex: whether the losses are convex.
        ratio: B^2, for parallel alone.
        strong: mu of strongly convex losses, for two_way alone.

    >>> limit("parallel", 2.0, convex=True, ratio=1.0)
    0.041666666666666664
    """
    if how == "parallel" and ratio is None:
        raise ValueError("limit: parallel training needs ratio, that is B^2")
    inverse = {
        "parallel": 6 * (1 + (ratio or 0)) * smooth,
        "one_way": (8 if convex else 18) * smooth,
        "two_way": max((81 if convex else 24) * smooth, 15 * strong),
    }
    return 1 / inverse[how]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How far every client is from the others: the two measures that APFL's theorems use.

With F the plain mean of all f_i, w* its minimizer and v_i* that of f_i::

    zeta_i  = sup over w of |grad F(w) - grad f_i(w)|^2
    Delta_i = |v_i* - w*|^2

The error that the theorems leave in the deployed model grows with both, times the
square of alpha: clients with larger measures should share less.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461, section 5.
"""

import jax
import numpy as np

from fedblend import trees
from fedblend.core import Loss, PyTree, Shard
from fedblend.data import map_clients
from fedblend.data.federated import FederatedData
from fedblend.losses import gradient
from fedblend.shards import everything
from fedblend.theory.flix_objective import stacked


def gradient_diversity(
    loss: Loss,
    points: PyTree,
    federated_data: FederatedData,
    *,
    chunk: int = map_clients.CHUNK,
) -> np.ndarray:
    """zeta_i of every client, the largest value at some points.

    The supremum is over all w and may be infinite; the maximum over a few points is a
    lower bound, and exact where f_i differ by linear terms only.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        points: parameters with a leading axis of points, such as the shared models of
            some rounds.
        federated_data: whose training rows.
        chunk: clients of a group; see ``map_clients``.

    >>> import jax.numpy as jnp
    >>> from fedblend.data.federated import federate
    >>> from fedblend.data.datasets.quadratics import quadratic_loss
    >>> rows = np.ones((2, 1, 1)), np.array([[0.0], [4.0]])
    >>> two = federate(rows, [np.array([0]), np.array([1])])
    >>> gradient_diversity(quadratic_loss, jnp.zeros((1, 1)), two)
    array([4., 4.])
    """
    gradient_at, train = gradient(loss), federated_data.train

    def of_point(point):
        def own(shard: Shard) -> PyTree:
            return gradient_at(point, everything(shard))

        average = map_clients.mean(own, train, chunk)

        def gap(shard: Shard) -> jax.Array:
            return trees.squared_norm(trees.subtract(own(shard), average))

        return map_clients.mapped(gap, train, chunk)

    return np.asarray(jax.lax.map(of_point, points).max(axis=0), np.float64)


def model_distances(personal: PyTree, shared: PyTree) -> np.ndarray:
    """Delta_i of every client, if the models are the minimizers.

    Args:
        personal: v_i*, a tree of arrays with a leading axis of clients.
        shared: w*, the minimizer of the mean of all f_i; not FLIX's shared model, which
            minimizes another objective unless all alpha are 1.
    """
    center = stacked(jax.tree.map(lambda leaf: leaf[None], shared))
    return ((stacked(personal) - center) ** 2).sum(axis=1)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Theory of APFL: step sizes, mixing weights, and how far clients are from each other.

All f_i are L-smooth and mu-strongly convex, kappa = L/mu, tau local steps a round, and
step t = 1, 2 ... counts over all rounds. Alpha is the weight of the shared model::

    alpha small enough      rate 16/(mu (t + a)), a = max(128 kappa, tau)    (2, 3)
      that is               alpha <= min(1, 1/sqrt(mu))/(4 sqrt(6) kappa)
    any alpha, |grad| <= G  rate 8/(mu (t + a)),  a = max(64 kappa, tau)     (4)
    nonconvex, all clients  rate 1/(2 sqrt(5) L sqrt(T)) for T steps         (5, 6)

with the numbers of theorems in brackets. The strongly convex ones are about averages
with the weights (t + a)^2, which ``apfl_averaged`` computes; ``Decay.shift`` is its a.
Alpha is fixed in all theorems.

Where this differs from the paper: its main text prints the condition on alpha with
``4 sqrt(6 kappa)`` (Theorem 3, Remark 5), its appendix with ``4 sqrt(6) kappa``
(Theorems 7 and 8, without sampling). ``largest_alpha`` is that of the appendix, which
has the proofs: as kappa >= 1, its alpha is the smaller one and meets both conditions.

Two measures of how far client i is from the others (section 5), with F the unweighted
mean of all f_i, w* its minimizer and v_i* that of f_i::

    zeta_i  = sup over w of |grad F(w) - grad f_i(w)|^2
    Delta_i = |v_i* - w*|^2

The error that the theorems leave in the deployed model grows with both, times the
square of alpha: clients with larger measures should share less.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461. Its alpha is the weight of v, one minus the one here.
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from fedblend import trees
from fedblend.batches import everything
from fedblend.checks import COUNT, gate
from fedblend.core import Loss, PyTree, Shard
from fedblend.data.federated import FederatedData
from fedblend.losses import gradient
from fedblend.theory.constants import Smoothness, stack_models
from fedblend_reproductions.clients import CHUNK, map_clients, mean_of_clients


class Decay(NamedTuple):
    """The schedule ``top/(t + shift)``, for ``Scheduled(decay, "step")``.

    A schedule counts the steps before this one, so that step t has the count t - 1.
    """

    top: float
    shift: float

    def __call__(self, count):
        """The rate of the step after ``count`` others."""
        return self.top / (count + 1 + self.shift)


@gate(steps=COUNT)
def small_alpha(smoothness: Smoothness, steps: int) -> Decay:
    """The rate for every alpha up to ``largest_alpha`` (Theorems 2 and 3).

    Args:
        smoothness: of all f_i; L is the largest L_i, mu the smallest mu_i.
        steps: tau, local steps of a round.
    """
    return _decay(smoothness, steps, 16)


@gate(steps=COUNT)
def any_alpha(smoothness: Smoothness, steps: int) -> Decay:
    """The rate for any alpha, where gradients are bounded (Theorem 4).

    Arguments as for ``small_alpha``.
    """
    return _decay(smoothness, steps, 8)


@gate(horizon=COUNT)
def nonconvex(smoothness: Smoothness, horizon: int) -> float:
    """The rate for ``horizon`` local steps in all, all clients taking part (5, 6)."""
    return 1 / (2 * math.sqrt(5 * horizon) * float(smoothness.smooth.max()))


def largest_alpha(smoothness: Smoothness) -> float:
    """The largest weight of the shared model for which Theorem 3 holds."""
    mu, kappa = _condition(smoothness)
    return min(1, 1 / math.sqrt(mu)) / (4 * math.sqrt(6) * kappa)


def _decay(smoothness: Smoothness, steps: int, top: int) -> Decay:
    mu, kappa = _condition(smoothness)
    return Decay(top / mu, max(8 * top * kappa, steps))


def _condition(smoothness: Smoothness) -> tuple[float, float]:
    mu = float(smoothness.convex.min())
    if not mu > 0:
        raise ValueError(f"convex: {mu} is not above 0; theory needs strong convexity")
    return mu, float(smoothness.smooth.max()) / mu


def gradient_diversity(
    loss: Loss,
    points: PyTree,
    federated_data: FederatedData,
    *,
    chunk: int = CHUNK,
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
    >>> from fedblend.data.datasets.built_in import quadratic_loss
    >>> rows = np.ones((2, 1, 1)), np.array([[0.0], [4.0]])
    >>> two = federate(rows, [np.array([0]), np.array([1])])
    >>> gradient_diversity(quadratic_loss, jnp.zeros((1, 1)), two)
    array([4., 4.])
    """
    gradient_at, train = gradient(loss), federated_data.train

    def of_point(point):
        def own(shard: Shard) -> PyTree:
            return gradient_at(point, everything(shard))

        average = mean_of_clients(own, train, chunk)

        def gap(shard: Shard) -> jax.Array:
            return trees.sum_squares(trees.subtract(own(shard), average))

        return map_clients(gap, train, chunk)

    return np.asarray(jax.lax.map(of_point, points).max(axis=0), np.float64)


def model_distances(personal: PyTree, shared: PyTree) -> np.ndarray:
    """Delta_i of every client, if the models are the minimizers.

    Args:
        personal: v_i*, a tree of arrays with a leading axis of clients.
        shared: w*, the minimizer of the mean of all f_i; not FLIX's shared model, which
            minimizes another objective unless all alpha are 1.
    """
    center = stack_models(jax.tree.map(lambda leaf: leaf[None], shared))
    return ((stack_models(personal) - center) ** 2).sum(axis=1)

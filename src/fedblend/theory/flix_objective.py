# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The constants of FLIX's objective, ``f~(x) = mean f_i(alpha_i x + (1-alpha_i) x_i)``.

From those of f_i, the weights alpha_i and the pure local models x_i::

    L_alpha = mean alpha_i^2 L_i        mu_alpha = mean alpha_i^2 mu_i
    w_i = alpha_i^2 L_i / (n L_alpha)   x_avg = sum w_i x_i
    V = sum w_i |x_i - x_avg|^2         D = max |x_i - x_j|^2        M = mean L_i^2

f~ is L_alpha-smooth and mu_alpha-strongly convex (Proposition 2). D is a SQUARED
distance, as in the proofs; statements of the paper print it without the square.

Gasanov, Khaled, Horvath, Richtarik, "FLIX: A Simple and Communication-Efficient
Alternative to Local Methods in Federated Learning" (AISTATS 2022),
gasanov2022flix; theorems are numbered as there.
"""

from typing import NamedTuple

import jax
import numpy as np

from fedblend.checks import ALPHA, Number
from fedblend.core import PyTree
from fedblend.errors import UserError
from fedblend.theory.constants import Smoothness

ANY_BY_CLIENT = Number(clients=True)


class Mixture(NamedTuple):
    """The constants of f~; see the text of this module.

    ``alpha`` and ``smoothness`` are per client, ``average`` is x_avg as a vector,
    ``clients`` is n, ``mean_smooth`` the unweighted mean of L_i and ``mean_convex``
    that of mu_i.
    """

    alpha: np.ndarray
    smoothness: Smoothness
    L_alpha: float
    mu_alpha: float
    average: np.ndarray
    V: float
    D: float

    @property
    def clients(self) -> int:
        """The number of clients, n."""
        return len(self.alpha)

    @property
    def mean_smooth(self) -> float:
        """The mean of L_i, in the paper L with a hat."""
        return float(self.smoothness.smooth.mean())

    @property
    def mean_convex(self) -> float:
        """The mean of mu_i, in the paper mu with a hat."""
        return float(self.smoothness.convex.mean())


def mixture(alpha, smoothness: Smoothness, personal: PyTree) -> Mixture:
    """All constants of f~.

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        personal: the pure local models x_i: a matrix [clients, dim], or a tree of
            arrays with a leading axis of clients.
    """
    alpha = per_client("alpha", alpha, len(smoothness.smooth), ALPHA)
    models = stacked(personal)
    if len(models) != len(alpha):
        raise ValueError(f"personal: {len(models)} models for {len(alpha)} clients")
    own = weights(alpha, smoothness)
    return Mixture(
        alpha=alpha,
        smoothness=smoothness,
        L_alpha=L_alpha(alpha, smoothness),
        mu_alpha=mu_alpha(alpha, smoothness),
        average=own @ models,
        V=V(models, own),
        D=D(models),
    )


def per_client(
    name: str, value, clients: int, rule: Number = ANY_BY_CLIENT
) -> np.ndarray:
    """One float64 for every client, [clients], from one number or one for each."""
    value = np.asarray(rule(name, value), np.float64)
    if value.shape not in ((), (clients,)):
        allowed = f"one value, or one for each of the {clients} clients"
        raise UserError(name, value, allowed, f"an array of {len(value)}")
    return np.broadcast_to(value, (clients,))


def stacked(personal: PyTree) -> np.ndarray:
    """Models with a leading axis of clients, as a matrix [clients, dim] in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(personal)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def L_alpha(alpha, smoothness: Smoothness) -> float:
    """``mean alpha_i^2 L_i``, the smoothness of f~ (Proposition 2)."""
    squared = squared_alpha(alpha, smoothness)
    return float(squared @ smoothness.smooth) / len(squared)


def mu_alpha(alpha, smoothness: Smoothness) -> float:
    """``mean alpha_i^2 mu_i``, the strong convexity of f~ (Proposition 2)."""
    squared = squared_alpha(alpha, smoothness)
    return float(squared @ smoothness.convex) / len(squared)


def squared_alpha(alpha, smoothness: Smoothness) -> np.ndarray:
    """``alpha_i^2`` of every client."""
    return per_client("alpha", alpha, len(smoothness.smooth), ALPHA) ** 2


def smoothness_of_parts(alpha, smoothness: Smoothness) -> np.ndarray:
    """``l_i = alpha_i^2 L_i``, the smoothness of every f~_i."""
    return squared_alpha(alpha, smoothness) * smoothness.smooth


def weights(alpha, smoothness: Smoothness) -> np.ndarray:
    """Weights of x_avg for minimizers: ``alpha_i^2 L_i``, normalized (Theorem 1).

    Uniform where all of them are 0: any average will do.
    """
    return _normalized(smoothness_of_parts(alpha, smoothness))


def stationary_weights(alpha, smoothness: Smoothness) -> np.ndarray:
    """Weights of x_avg for stationary points: ``alpha_i^4 L_i^2``, normalized.

    Theorem 3, whose V is the one under these weights.
    """
    return _normalized(smoothness_of_parts(alpha, smoothness) ** 2)


def _normalized(raw: np.ndarray) -> np.ndarray:
    total = raw.sum()
    return raw / total if total > 0 else np.full(len(raw), 1 / len(raw))


def V(personal: PyTree, weights: np.ndarray) -> float:
    """``sum w_i |x_i - sum w_j x_j|^2``, the weighted variance of the models."""
    models = stacked(personal)
    gaps = models - weights @ models
    return float(weights @ np.einsum("nd,nd->n", gaps, gaps))


def D(personal: PyTree) -> float:
    """``max |x_i - x_j|^2``: the largest squared distance of two models."""
    models = stacked(personal)
    return max(float(((models - own) ** 2).sum(axis=1).max()) for own in models)


def M(smoothness: Smoothness) -> float:
    """``mean L_i^2``, of the one-shot theorem for stationary points (Theorem 3)."""
    return float(np.mean(smoothness.smooth**2))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The constants of f_i and of FLIX's objective: how smooth and how convex they are.

``f_i`` is the mean loss over the client's training rows, plus ``l2/2 |x|^2``. It is
L_i-smooth and mu_i-strongly convex if all eigenvalues of its Hessian lie in
``[mu_i, L_i]``. With the rows of client i as a matrix A_i of k_i rows::

    logistic        L_i = lambda_max(A_i^T A_i)/(4 k_i) + l2,   mu_i = l2
    softmax         L_i = lambda_max(A_i^T A_i)/(2 k_i) + l2,   mu_i = l2
    least squares   L_i = lambda_max(A_i^T A_i)/k_i + l2,       mu_i = lambda_min(same)
    quadratics      the extreme eigenvalues of the mean of the client's matrices

Where this differs from the code published with FLIX: there l2 is inside the division by
4 k_i, which makes L_i too small by almost l2.

Small Gram matrices ``A^T A`` are solved exactly, in float64. Large ones are bounded by
Lanczos, which is power iteration with all its vectors: from a random start, after m
products the largest Ritz value theta satisfies ``theta >= (1 - tolerance) lambda_max``
except with probability at most ``1.648 sqrt(d) exp(-sqrt(tolerance) (2m - 1))``, for
any matrix. With m chosen to make that 1e-12, ``theta / (1 - tolerance)`` is an upper
bound. Kuczyński, Woźniakowski, "Estimating the largest eigenvalue by the power and
Lanczos algorithms with a random start" (SIAM J. Matrix Anal. Appl. 13(4), 1992),
Theorem 4.2, kuczynski1992lanczos. There m is the dimension of span(b, Ab, ..., A^(m-1)
b), as here.

The constants of FLIX's objective ``f~(x) = mean f_i(alpha_i x + (1-alpha_i) x_i)`` come
from those of f_i, the weights alpha_i and the pure local models x_i::

    L_alpha = mean alpha_i^2 L_i        mu_alpha = mean alpha_i^2 mu_i
    w_i = alpha_i^2 L_i / (n L_alpha)   x_avg = sum w_i x_i
    V = sum w_i |x_i - x_avg|^2

f~ is L_alpha-smooth and mu_alpha-strongly convex (Proposition 2).

Gasanov, Khaled, Horvath, Richtarik, "FLIX: A Simple and Communication-Efficient
Alternative to Local Methods in Federated Learning" (AISTATS 2022),
gasanov2022flix; theorems are numbered as there.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from fedblend.checks import ALPHA, NOT_NEGATIVE, Number
from fedblend.core import PyTree
from fedblend.data.federated import FederatedData
from fedblend.errors import UserError

EXACT_LIMIT = 1500
"""Matrices up to this order are solved exactly, which takes about a second."""

FAILURE, TOLERANCE = 1e-12, 0.01
"""The probability that a bound by Lanczos fails, and by how much it is too large."""

ANY_BY_CLIENT = Number(clients=True)


class Smoothness(NamedTuple):
    """The constants of all clients.

    ``smooth`` is L_i and ``convex`` is mu_i, [clients] in float64. True L_i are no
    larger and true mu_i no smaller. ``exact``: they are the best possible ones.
    """

    smooth: np.ndarray
    convex: np.ndarray
    exact: bool


def logistic(
    federated_data: FederatedData, l2: float = 0.0, intercept: bool = False
) -> Smoothness:
    """Of ``log(1 + exp(-y a^T x)) + l2/2 |x|^2``: exact, attained at x = 0.

    Args:
        federated_data: rows are ``(inputs, targets)``.
        l2: strength of the penalty, over all parameters.
        intercept: the model adds an intercept, that is a column of ones.

    >>> import numpy as np
    >>> from fedblend.data.federated import federate
    >>> rows = (np.array([[2.0], [0.0]]), np.array([1, 0]))
    >>> logistic(federate(rows, [np.arange(2)]), l2=0.1).smooth
    array([0.6])
    """
    return _linear(federated_data, l2, intercept, 0.25)


def softmax(
    federated_data: FederatedData, l2: float = 0.0, intercept: bool = False
) -> Smoothness:
    """Of softmax cross entropy on linear scores: a bound, for any number of classes.

    The Hessian of a row is ``(diag(p) - p p^T) (x) a a^T``, and the first factor has
    eigenvalues of at most 1/2: Böhning, "Multinomial logistic regression algorithm"
    (Annals of the Institute of Statistical Mathematics 44(1), 1992),
    bohning1992multinomial. Arguments as for ``logistic``.
    """
    return _linear(federated_data, l2, intercept, 0.5)._replace(exact=False)


def least_squares(
    federated_data: FederatedData, l2: float = 0.0, intercept: bool = False
) -> Smoothness:
    """Of half the squared error on linear outputs. Arguments as for ``logistic``."""
    return _linear(federated_data, l2, intercept, 1.0, strong=True)


def quadratics(federated_data: FederatedData) -> Smoothness:
    """Of the mean of ``1/2 x^T A x - b^T x`` over rows ``(A, b)``."""
    rows = map(federated_data.train.rows, range(federated_data.clients))
    means = [np.asarray(matrices, np.float64).mean(axis=0) for matrices, _ in rows]
    values = np.array([np.linalg.eigvalsh(mean)[[0, -1]] for mean in means])
    return Smoothness(np.abs(values).max(axis=1), np.maximum(values[:, 0], 0), True)


def _linear(
    federated_data: FederatedData,
    l2: float,
    intercept: bool,
    curvature: float,
    strong: bool = False,
) -> Smoothness:
    """The constants of a loss whose curvature in a score is at most ``curvature``.

    ``strong``: it has this curvature everywhere.
    """
    NOT_NEGATIVE("l2", l2)
    found = []
    for client in range(federated_data.clients):
        inputs = np.asarray(federated_data.train.rows(client)[0], np.float64)
        inputs = inputs.reshape(len(inputs), -1)
        if intercept:
            inputs = np.pad(inputs, ((0, 0), (0, 1)), constant_values=1.0)
        found.append((*gram_extremes(inputs), len(inputs)))
    smallest, largest, exact, counts = (np.array(of) for of in zip(*found, strict=True))
    convex = curvature * strong * smallest / counts + l2
    return Smoothness(curvature * largest / counts + l2, convex, bool(exact.all()))


def gram_extremes(
    rows: np.ndarray, exact_limit: int = EXACT_LIMIT
) -> tuple[float, float, bool]:
    """The smallest and the largest eigenvalue of ``rows^T rows``; are they exact?

    Args:
        rows: a matrix [rows, dim].
        exact_limit: above this, for the smaller side, the largest eigenvalue is an
            upper bound by Lanczos and the smallest the lower bound 0.
    """
    rows = np.asarray(rows, np.float64)
    count, dim = rows.shape
    if min(count, dim) > exact_limit:
        return 0.0, largest_eigenvalue(lambda v: rows.T @ (rows @ v), dim), False
    small_side = rows @ rows.T if count < dim else rows.T @ rows
    values = np.linalg.eigvalsh(small_side)
    smallest = 0.0 if count < dim else max(float(values[0]), 0.0)
    return smallest, max(float(values[-1]), 0.0), True


def largest_eigenvalue(product: Callable[[np.ndarray], np.ndarray], dim: int) -> float:
    """An upper bound on the largest eigenvalue of a positive semidefinite matrix.

    Args:
        product: the matrix times a vector.
        dim: the length of the vector.
    """
    from scipy.linalg import eigvalsh_tridiagonal

    odds = math.log(1.648 * math.sqrt(dim) / FAILURE)
    products = min(dim, math.ceil((odds / math.sqrt(TOLERANCE) + 1) / 2))
    start = np.random.default_rng(0).standard_normal(dim)
    basis = [start / np.linalg.norm(start)]
    diagonal, off_diagonal = [], []
    for _ in range(products):
        vector = product(basis[-1])
        diagonal.append(basis[-1] @ vector)
        known = np.stack(basis)
        for _ in range(2):  # the second time removes the rounding error
            vector = vector - known.T @ (known @ vector)
        length = np.linalg.norm(vector)
        if length <= 1e-14 * max(abs(value) for value in (*diagonal, 1e-300)):
            break
        off_diagonal.append(length)
        basis.append(vector / length)
    inner = off_diagonal[: len(diagonal) - 1]
    values = eigvalsh_tridiagonal(np.array(diagonal), np.array(inner))
    return max(float(values[-1]), 0.0) / (1 - TOLERANCE)


class MixtureConstants(NamedTuple):
    """The constants of f~; see the text of this module.

    ``alpha`` and ``smoothness`` are per client, ``average`` is x_avg as a vector.
    """

    alpha: np.ndarray
    smoothness: Smoothness
    L_alpha: float
    mu_alpha: float
    average: np.ndarray
    V: float

    @property
    def clients(self) -> int:
        """The number of clients, n."""
        return len(self.alpha)


def mixture(alpha, smoothness: Smoothness, personal: PyTree) -> MixtureConstants:
    """All constants of f~.

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        personal: the pure local models x_i: a matrix [clients, dim], or a tree of
            arrays with a leading axis of clients.
    """
    alpha = client_values("alpha", alpha, len(smoothness.smooth), ALPHA)
    models = stack_models(personal)
    if len(models) != len(alpha):
        raise ValueError(f"personal: {len(models)} models for {len(alpha)} clients")
    own = weights(alpha, smoothness)
    return MixtureConstants(
        alpha=alpha,
        smoothness=smoothness,
        L_alpha=L_alpha(alpha, smoothness),
        mu_alpha=mu_alpha(alpha, smoothness),
        average=own @ models,
        V=V(models, own),
    )


def client_values(
    name: str, value, clients: int, rule: Number = ANY_BY_CLIENT
) -> np.ndarray:
    """One float64 for every client, [clients], from one number or one for each."""
    value = np.asarray(rule(name, value), np.float64)
    if value.shape not in ((), (clients,)):
        allowed = f"one value, or one for each of the {clients} clients"
        raise UserError(name, value, allowed, f"an array of {len(value)}")
    return np.broadcast_to(value, (clients,))


def stack_models(personal: PyTree) -> np.ndarray:
    """Models with a leading axis of clients, as a matrix [clients, dim] in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(personal)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def L_alpha(alpha, smoothness: Smoothness) -> float:
    """``mean alpha_i^2 L_i``, the smoothness of f~ (Proposition 2)."""
    squared = alpha_squares(alpha, smoothness)
    return float(squared @ smoothness.smooth) / len(squared)


def mu_alpha(alpha, smoothness: Smoothness) -> float:
    """``mean alpha_i^2 mu_i``, the strong convexity of f~ (Proposition 2)."""
    squared = alpha_squares(alpha, smoothness)
    return float(squared @ smoothness.convex) / len(squared)


def together(alpha, smoothness: Smoothness) -> Smoothness:
    """The constants of f~ itself, as if one client had it."""
    smooth, convex = L_alpha(alpha, smoothness), mu_alpha(alpha, smoothness)
    return smoothness._replace(smooth=np.array([smooth]), convex=np.array([convex]))


def alpha_squares(alpha, smoothness: Smoothness) -> np.ndarray:
    """``alpha_i^2`` of every client."""
    return client_values("alpha", alpha, len(smoothness.smooth), ALPHA) ** 2


def smoothness_of_parts(alpha, smoothness: Smoothness) -> np.ndarray:
    """``l_i = alpha_i^2 L_i``, the smoothness of every f~_i."""
    return alpha_squares(alpha, smoothness) * smoothness.smooth


def weights(alpha, smoothness: Smoothness) -> np.ndarray:
    """Weights of x_avg for minimizers: ``alpha_i^2 L_i``, normalized (Theorem 1).

    Uniform where all of them are 0: any average will do.
    """
    parts = smoothness_of_parts(alpha, smoothness)
    total = parts.sum()
    return parts / total if total > 0 else np.full(len(parts), 1 / len(parts))


def V(personal: PyTree, weights: np.ndarray) -> float:
    """``sum w_i |x_i - sum w_j x_j|^2``, the weighted variance of the models."""
    models = stack_models(personal)
    gaps = models - weights @ models
    return float(weights @ np.einsum("nd,nd->n", gaps, gaps))

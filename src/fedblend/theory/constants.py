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
    V = sum w_i |x_i - x_avg|^2         D = max |x_i - x_j|^2        M = mean L_i^2

f~ is L_alpha-smooth and mu_alpha-strongly convex (Proposition 2). D is a SQUARED
distance, as in the proofs; statements of the paper print it without the square.

Gasanov, Khaled, Horvath, Richtarik, "FLIX: A Simple and Communication-Efficient
Alternative to Local Methods in Federated Learning" (AISTATS 2022),
gasanov2022flix; theorems are numbered as there.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.batches import everything
from fedblend.checks import ALPHA, CHANCE, COUNT, NOT_NEGATIVE, Number, gate
from fedblend.core import Key, Loss, PyTree, Shard
from fedblend.data.federated import FederatedData
from fedblend.errors import UserError
from fedblend.losses import objective

EXACT_LIMIT = 1500
"""Matrices up to this order are solved exactly, which takes about a second."""

FAILURE = 1e-12
"""The probability that a bound by Lanczos fails."""

ANY_BY_CLIENT = Number(clients=True)


class Smoothness(NamedTuple):
    """The constants of all clients.

    ``smooth`` is L_i and ``convex`` is mu_i, [clients] in float64. ``exact``: they are
    the best possible ones. ``certain``: true L_i are no larger and true mu_i no
    smaller, so that every theorem holds with them; False for estimates.
    """

    smooth: np.ndarray
    convex: np.ndarray
    exact: bool
    certain: bool = True


class Extremes(NamedTuple):
    """The smallest and the largest eigenvalue; bounds where not ``exact``."""

    smallest: float
    largest: float
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
    return _linear(federated_data, l2, intercept, 0.25, np.zeros_like)


def softmax(
    federated_data: FederatedData, l2: float = 0.0, intercept: bool = False
) -> Smoothness:
    """Of softmax cross entropy on linear scores: a bound, for any number of classes.

    The Hessian of a row is ``(diag(p) - p p^T) (x) a a^T``, and the first factor has
    eigenvalues of at most 1/2: Böhning, "Multinomial logistic regression algorithm"
    (Annals of the Institute of Statistical Mathematics 44(1), 1992),
    bohning1992multinomial. Arguments as for ``logistic``.
    """
    bound = _linear(federated_data, l2, intercept, 0.5, np.zeros_like)
    return bound._replace(exact=False)


def least_squares(
    federated_data: FederatedData, l2: float = 0.0, intercept: bool = False
) -> Smoothness:
    """Of half the squared error on linear outputs. Arguments as for ``logistic``."""
    return _linear(federated_data, l2, intercept, 1.0, np.copy)


def quadratics(federated_data: FederatedData) -> Smoothness:
    """Of the mean of ``1/2 x^T A x - b^T x`` over rows ``(A, b)``."""
    values = np.array(
        [
            np.linalg.eigvalsh(np.asarray(matrices, np.float64).mean(axis=0))[[0, -1]]
            for matrices, _ in map(
                federated_data.train.rows, range(federated_data.clients)
            )
        ]
    )
    return Smoothness(np.abs(values).max(axis=1), np.maximum(values[:, 0], 0), True)


def _linear(
    federated_data: FederatedData,
    l2: float,
    intercept: bool,
    curvature: float,
    lowest: Callable[[np.ndarray], np.ndarray],
) -> Smoothness:
    """The constants of a loss whose curvature in a score is at most ``curvature``."""
    NOT_NEGATIVE("l2", l2)
    found = [
        _gram(federated_data, client, intercept)
        for client in range(federated_data.clients)
    ]
    counts = np.asarray(federated_data.train.counts, np.float64)
    largest = np.array([extremes.largest for extremes in found])
    smallest = np.array([extremes.smallest for extremes in found])
    exact = all(extremes.exact for extremes in found)
    convex = lowest(curvature * smallest / counts) + l2
    return Smoothness(curvature * largest / counts + l2, convex, exact)


def _gram(federated_data: FederatedData, client: int, intercept: bool) -> Extremes:
    inputs = np.asarray(federated_data.train.rows(client)[0], np.float64)
    inputs = inputs.reshape(len(inputs), -1)
    if intercept:
        inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    return gram_extremes(inputs, EXACT_LIMIT)


@gate(points=COUNT, radius=NOT_NEGATIVE, products=COUNT)
def estimated(
    loss: Loss,
    params: PyTree,
    federated_data: FederatedData,
    key: Key,
    *,
    points: int = 4,
    radius: float = 1.0,
    products: int = 50,
) -> Smoothness:
    """Estimates for any loss, by power iteration on Hessian-vector products.

    L_i is the largest magnitude of an eigenvalue at the sampled points, mu_i the
    smallest eigenvalue, at least 0. Elsewhere the Hessian may be larger, and power
    iteration stops early, so that L_i tends to be too small: use a step from it as a
    start for tuning.

    Args:
        loss: one number for every row.
        params: the center of the sampled points, itself the first of them.
        federated_data: whose training rows.
        key: of the points and of the starts of power iteration.
        points: number of points.
        radius: their distance from ``params``.
        products: number of products with the Hessian for each eigenvalue.
    """
    train = federated_data.train
    center, layout = trees.ravel(params)

    def extremes(shard, point_key, distance):
        batch = everything(shard)
        gradient = jax.grad(lambda x: objective(loss, trees.unravel(x, layout), batch))
        place = center + distance * _direction(keys.named(point_key, "point"), center)
        start = _direction(keys.named(point_key, "start"), center)

        def hessian(vector):
            return jax.jvp(gradient, (place,), (vector,))[1]

        size = jnp.abs(_power(hessian, start, products))
        above = _power(lambda v: size * v - hessian(v), start, products)
        return size, size - above

    def of_client(client):
        id, start, count = client
        shard = Shard(train.examples, start, count, id, train.capacity)
        point_keys = jax.random.split(keys.at(key, "smoothness", client=id), points)
        pairs = (point_keys, jnp.where(jnp.arange(points) == 0, 0.0, radius))
        largest, smallest = jax.lax.map(lambda pair: extremes(shard, *pair), pairs)
        return largest.max(), jnp.maximum(smallest.min(), 0)

    numbers = (np.arange(federated_data.clients), train.starts, train.counts)
    as_arrays = tuple(jnp.asarray(number, jnp.int32) for number in numbers)
    largest, smallest = jax.lax.map(of_client, as_arrays)
    return Smoothness(
        np.asarray(largest, np.float64),
        np.asarray(smallest, np.float64),
        exact=False,
        certain=False,
    )


def _direction(key: Key, like: jax.Array) -> jax.Array:
    """A random vector of length 1."""
    vector = jax.random.normal(key, like.shape, like.dtype)
    return vector / jnp.linalg.norm(vector)


def _power(product, start: jax.Array, products: int) -> jax.Array:
    """The Rayleigh quotient after some products with a symmetric matrix."""

    def improve(_, vector):
        longer = product(vector)
        length = jnp.linalg.norm(longer)
        return jnp.where(length > 0, longer / jnp.where(length > 0, length, 1), vector)

    vector = jax.lax.fori_loop(0, products, improve, start)
    return jnp.vdot(vector, product(vector))


def gram_extremes(
    rows: np.ndarray, exact_limit: int = EXACT_LIMIT, tolerance: float = 0.01
) -> Extremes:
    """The smallest and the largest eigenvalue of ``rows^T rows``.

    Args:
        rows: a matrix [rows, dim].
        exact_limit: above this, for the smaller side, the largest eigenvalue is an
            upper bound by Lanczos and the smallest the lower bound 0.
        tolerance: the bound is too large by at most this fraction.
    """
    rows = np.asarray(rows, np.float64)
    count, dim = rows.shape
    if min(count, dim) > exact_limit:
        largest = largest_eigenvalue(lambda v: rows.T @ (rows @ v), dim, tolerance)
        return Extremes(0.0, largest, exact=False)
    small_side = rows @ rows.T if count < dim else rows.T @ rows
    values = np.linalg.eigvalsh(small_side)
    smallest = 0.0 if count < dim else max(float(values[0]), 0.0)
    return Extremes(smallest, max(float(values[-1]), 0.0), exact=True)


def largest_eigenvalue(
    product: Callable[[np.ndarray], np.ndarray],
    dim: int,
    tolerance: float = 0.01,
    seed: int = 0,
) -> float:
    """An upper bound on the largest eigenvalue of a positive semidefinite matrix.

    Args:
        product: the matrix times a vector.
        dim: the length of the vector.
        tolerance: the bound is too large by at most this fraction.
        seed: of the random start.
    """
    CHANCE("tolerance", tolerance)
    odds = math.log(1.648 * math.sqrt(dim) / FAILURE)
    products = min(dim, math.ceil((odds / math.sqrt(tolerance) + 1) / 2))
    start = np.random.default_rng(seed).standard_normal(dim)
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
    tridiagonal = np.diag(diagonal) + np.diag(inner, 1) + np.diag(inner, -1)
    return max(float(np.linalg.eigvalsh(tridiagonal)[-1]), 0.0) / (1 - tolerance)


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


def together(alpha, smoothness: Smoothness) -> Smoothness:
    """The constants of f~ itself, as if one client had it."""
    smooth, convex = L_alpha(alpha, smoothness), mu_alpha(alpha, smoothness)
    return smoothness._replace(smooth=np.array([smooth]), convex=np.array([convex]))


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

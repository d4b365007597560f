# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Extreme eigenvalues of Gram matrices ``A^T A``, in float64.

Small ones are solved exactly. Large ones by Lanczos, which is power iteration that
remembers its vectors: from a random start, after m products the largest Ritz value
theta satisfies ``theta >= (1 - tolerance) lambda_max`` but with probability at most
``1.648 sqrt(d) exp(-sqrt(tolerance) (2m - 1))``, whatever the matrix. With m chosen
to make that 1e-12, ``theta / (1 - tolerance)`` is an upper bound.

Kuczyński, Woźniakowski, "Estimating the largest eigenvalue by the power and Lanczos
algorithms with a random start" (SIAM J. Matrix Anal. Appl. 13(4), 1992), Theorem 4.2,
kuczynski1992lanczos. There m is the dimension of span(b, Ab, ..., A^(m-1) b), as here.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedblend.checks import CHANCE

EXACT_LIMIT = 1500
"""Up to this order a matrix is solved exactly: about a second."""

FAILURE = 1e-12
"""The probability with which a bound by Lanczos may fail."""


class Extremes(NamedTuple):
    """The eigenvalues between which all others lie; bounds where not exact."""

    smallest: float
    largest: float
    exact: bool


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
        for _ in range(2):  # once more removes what rounding left
            vector = vector - known.T @ (known @ vector)
        length = np.linalg.norm(vector)
        if length <= 1e-14 * max(abs(value) for value in (*diagonal, 1e-300)):
            break
        off_diagonal.append(length)
        basis.append(vector / length)
    inner = off_diagonal[: len(diagonal) - 1]
    tridiagonal = np.diag(diagonal) + np.diag(inner, 1) + np.diag(inner, -1)
    return max(float(np.linalg.eigvalsh(tridiagonal)[-1]), 0.0) / (1 - tolerance)

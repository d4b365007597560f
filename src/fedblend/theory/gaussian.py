# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Epsilon of Gaussian mechanisms that compose, without sampling.

Mechanisms with mu_1, mu_2, ... compose to one with mu^2 = sum of mu_k^2, also where
each query is chosen after the answers before (Dong, Roth, Su, "Gaussian differential
privacy", 2019, arXiv:1905.02383). Its epsilon at a delta is exact (Balle, Wang, ICML
2018, arXiv:1805.06530).
"""

from collections.abc import Mapping
from math import erfc, exp, inf, log, pi, sqrt

from scipy.stats import binom


def gaussian_epsilon(squared: float, delta: float) -> float:
    """Epsilon at a delta of a Gaussian mechanism with this mu^2.

    >>> round(gaussian_epsilon(1.0, 1e-5), 2)
    4.38
    """
    if squared == 0:
        return 0.0
    if squared == inf:
        return inf
    mu = sqrt(squared)

    def failure(bound: float) -> float:
        first, second = (_log_above(bound / mu + side * mu / 2) for side in (-1, 1))
        return exp(first) - exp(bound + second)

    low, high = 0.0, 1.0
    while failure(high) > delta:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if failure(middle) > delta else (low, middle)
    return high


def row_epsilon(steps: Mapping[tuple[float, float], int], delta: float) -> float:
    """Epsilon at a delta of a row, whose gradients ``row_noise`` perturbs.

    A row that is in the batch of a step moves its sum by one clip. Where batches are
    drawn, half of delta is for the chance that a row was in more of them than counted.

    Args:
        steps: evaluations by their noise, in clips, and by the chance that a given row
            was in the batch.
        delta: of the guarantee.
    """
    drawn = sum(share < 1 for _, share in steps)
    squared = 0.0
    for (noise, share), times in steps.items():
        most = times
        if share < 1:
            most = float(binom.isf(delta / 2 / drawn, times, share))
        squared += most / noise**2 if noise else inf
    return gaussian_epsilon(squared, delta / 2 if drawn else delta)


def _log_above(at: float) -> float:
    """The logarithm of the chance that a standard normal number is larger.

    Far out it is a lower bound that is right to 1 / at^2: epsilon is never too small.
    """
    if at < 30:
        return log(erfc(at / sqrt(2)) / 2)
    return -at * at / 2 - log(at + 1 / at) - log(2 * pi) / 2

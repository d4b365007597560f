# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Epsilon of the Gaussian mechanism, by its defining equation."""

import math

from scipy.optimize import brentq
from scipy.stats import norm


def gaussian(shift: float, delta: float) -> float:
    """Epsilon of N(0, 1) against N(shift, 1): theorem 8 of Balle and Wang."""

    def excess(epsilon):
        upper = norm.cdf(shift / 2 - epsilon / shift)
        lower = norm.logcdf(-shift / 2 - epsilon / shift)
        return upper - math.exp(epsilon + lower) - delta

    return brentq(excess, 0, 500, xtol=1e-12)  # pyright: ignore

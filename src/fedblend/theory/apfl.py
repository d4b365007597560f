# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Step sizes and mixing weights that theory allows for APFL.

All f_i are L-smooth and mu-strongly convex, kappa = L/mu, tau local steps a round, and
step t = 1, 2 ... counts over all rounds. Alpha is the weight of the shared model::

    alpha small enough      rate 16/(mu (t + a)), a = max(128 kappa, tau)    (2, 3)
      that is               alpha <= min(1, 1/sqrt(mu))/(4 sqrt(6) kappa)
    any alpha, |grad| <= G  rate 8/(mu (t + a)),  a = max(64 kappa, tau)     (4)
    nonconvex, all clients  rate 1/(2 sqrt(5) L sqrt(T)) for T steps         (5, 6)

with the numbers of theorems in brackets. The strongly convex ones are about averages
with the weights (t + a)^2, which ``apfl_averaged`` computes; ``Decay.shift`` is its a.
Alpha is fixed in all theorems.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461. Its alpha is the weight of v, one minus the one here.
"""

import math
from typing import NamedTuple

from fedblend.checks import COUNT, gate
from fedblend.theory.constants import Smoothness


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

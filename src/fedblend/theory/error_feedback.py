# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""EF21 and EF21-P on gradient descent: one equation for the step of both.

f~ is L-smooth and satisfies ``|grad f~(x)|^2 >= 2 mu (f~(x) - f~*)``, which strong
convexity implies. Compressors contract, ``E |C(v) - v|^2 <= (1 - delta) |v|^2``, and
Young's inequality, with its best constant, gives for any v and w::

    E |C(v + w) - (v + w)|^2 <= (1 - theta) |v|^2 + beta |w|^2
    theta = 1 - sqrt(1 - delta),   beta = (1 - delta)/theta

**EF21** (clients compress). Clients' estimates g_i of their gradients have the mean
squared error G; S^2 = mean l_i^2. With x+ = x - gamma mean g_i::

    f~(x+) <= f~(x) - gamma/2 |grad f~(x)|^2 - (1/gamma - L)/2 |x+ - x|^2 + gamma/2 G
    E G+   <= (1 - theta) G + beta S^2 |x+ - x|^2

**EF21-P** (the server compresses). Clients have w, the server x; e = x - w. With x+ = x
- gamma grad f~(w)::

    f~(x+)   <= f~(x) - gamma/2 |grad f~(x)|^2 - gamma (1 - gamma L)/2 |grad f~(w)|^2
                + gamma L^2/2 |e|^2
    E |e+|^2 <= (1 - theta) |e|^2 + beta gamma^2 |grad f~(w)|^2

In both, ``Psi = f~(x) - f~* + weight * (G or |e|^2)`` shrinks by 1 - gamma mu if the
weight is ``gamma/(2 (theta - gamma mu))``, for EF21-P times L^2, and::

    (1 - gamma L) (theta - gamma mu) >= beta S^2 gamma^2,   for EF21-P with S = L

of which ``longest`` is the solution. For mu = 0 Psi does not grow, and the mean of
``|grad f~|^2`` over k rounds is at most ``2 Psi^0/(gamma k)``, also where f~ is not
convex.

Where this differs from the papers: EF21's Theorem 1 has ``1/(L + S sqrt(beta/theta))``,
which satisfies the inequality for mu = 0 and is smaller than its solution; Theorem 2
has ``min(1/(L + S sqrt(2 beta/theta)), theta/(2 mu))`` for the weight gamma/theta. The
paper on EF21-P is on convex f_i, with other constants and compressed answers.

Reference: Richtárik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically better,
and practically faster error feedback", NeurIPS 2021, arXiv:2106.05203; Gruntkowska,
Tyurin, Richtárik, "EF21-P and friends: improved theoretical communication complexity
for distributed optimization with bidirectional compression", ICML 2023,
arXiv:2209.15218.
"""

import math
from typing import NamedTuple


class Contraction(NamedTuple):
    """The constants theta and beta of this module's text."""

    theta: float
    beta: float


def contraction(delta: float) -> Contraction:
    """The constants of compressors that contract by ``delta``, in (0, 1]."""
    theta = 1 - math.sqrt(1 - delta)
    return Contraction(theta, (1 - delta) / theta)


def longest(smooth: float, spread: float, convex: float, delta: float) -> float:
    """The longest step that satisfies the inequality of this module's text.

    Args:
        smooth: L, above 0.
        spread: S.
        convex: mu, 0 or more.
        delta: how much compressors contract.
    """
    theta, beta = contraction(delta)
    # theta - gamma (mu + L theta) + gamma^2 (L mu - beta S^2) = 0, the smaller root in
    # the form that does not cancel.
    middle, last = convex + smooth * theta, smooth * convex - beta * spread**2
    root = math.sqrt(max(middle**2 - 4 * theta * last, 0.0))
    return 2 * theta / (middle + root)


def weight(step: float, convex: float, delta: float) -> float:
    """``gamma/(2 (theta - gamma mu))``: of the error in Psi, for EF21."""
    theta, _ = contraction(delta)
    return step / (2 * (theta - step * convex))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rates of DIANA, EF21 and EF21-P: Lyapunov functions with the best weights.

**DIANA.** Notation of ``steps``: f~_i is l_i-smooth and convex, f~ is L_alpha-smooth
and mu_alpha-strongly convex, memories follow at rates ``b_i <= 1/(omega_i + 1)``. Write
``D = f~(x) - f~*`` and ``g_i = grad f~_i(x)``, with a star for the same at x*. With
weights t_i that are free, one round of the Lyapunov function::

    Psi = |x - x*|^2 + gamma^2/n mean t_i omega_i |h_i - g_i*|^2

consists of (1) a descent step with the noise of independent compressors and (2)
memories that move by ``b_i C_i(g_i - h_i)``; ``c_i = 1 - b_i (1 + omega_i)``::

    (1)  E |x+ - x*|^2 <= (1 - gamma mu) |x - x*|^2 - 2 gamma (1 - gamma L) D
                          + gamma^2/n mean omega_i |g_i - h_i|^2
    (2)  E |h_i+ - g_i*|^2 <= (1 - b_i) |h_i - g_i*|^2 + b_i |g_i - g_i*|^2
                              - b_i c_i |g_i - h_i|^2

The last term of (2), which is dropped where b_i is the fastest rate, pays for a part of
the noise in (1). Of the rest, ``v_i = 1 - t_i b_i c_i``, Young's inequality ``|g_i -
h_i|^2 <= (1 + s_i) |g_i - g_i*|^2 + (1 + 1/s_i) |h_i - g_i*|^2`` makes terms that
contract by 1 - r if ``(1 + 1/s_i) v_i <= t_i (b_i - r)``. As ``mean w_i |g_i - g_i*|^2
<= 2 max(w_i l_i) D``, it follows that E Psi+ <= (1 - r) Psi for r <= gamma mu and::

    gamma <= 1/(L_alpha + max(l_i omega_i q_i)/n),   q_i = (1 + s_i) v_i + t_i b_i

The smallest q_i over s_i and t_i, with a = b - r and e = b c, has a closed form::

    t = (1 + a/root)/(a + e),  root = sqrt(a b + e r)
    q = (a (a - e) + b (a + e) + 2 a root)/(a + e)^2

It grows with r from ``q = 4/(1 + c)^2`` at r = 0, and ``r = gamma mu_alpha`` has a
single solution, which is the best rate. For the fastest memories q = (1 + sqrt(b/(b -
r)))^2: 4 where kappa is large, 1 for slow memories, where Theorem 5 of FLIX has 6.

Where this differs from the paper: Theorem 5 has the weight ``4/(min b_i)`` for all
clients, s = 1 and c = 0. Reference: see ``constants``; the function Psi is that of
Mishchenko, Gorbunov, Takáč, Richtárik, "Distributed learning with compressed gradient
differences", 2019, arXiv:1901.09269.

**Error feedback.** f~ is L-smooth and satisfies ``|grad f~(x)|^2 >= 2 mu (f~(x) -
f~*)``, which strong convexity implies. Compressors contract, ``E |C(v) - v|^2 <= (1 -
delta) |v|^2``, and Young's inequality, with its best constant, gives for any v and w::

    E |C(v + w) - (v + w)|^2 <= (1 - theta) |v|^2 + beta |w|^2
    theta = 1 - sqrt(1 - delta),   beta = (1 - delta)/theta

*EF21* (clients compress). Clients' estimates g_i of their gradients have the mean
squared error G; S^2 = mean l_i^2. With x+ = x - gamma mean g_i::

    f~(x+) <= f~(x) - gamma/2 |grad f~(x)|^2 - (1/gamma - L)/2 |x+ - x|^2 + gamma/2 G
    E G+   <= (1 - theta) G + beta S^2 |x+ - x|^2

*EF21-P* (the server compresses). Clients have w, the server x; e = x - w. With x+ = x
- gamma grad f~(w)::

    f~(x+)   <= f~(x) - gamma/2 |grad f~(x)|^2 - gamma (1 - gamma L)/2 |grad f~(w)|^2
                + gamma L^2/2 |e|^2
    E |e+|^2 <= (1 - theta) |e|^2 + beta gamma^2 |grad f~(w)|^2

In both, ``Psi = f~(x) - f~* + weight * (G or |e|^2)`` shrinks by 1 - gamma mu if the
weight is ``gamma/(2 (theta - gamma mu))``, for EF21-P times L^2, and::

    (1 - gamma L) (theta - gamma mu) >= beta S^2 gamma^2,   for EF21-P with S = L

of which ``longest_with_feedback`` is the solution. For mu = 0 Psi does not grow, and
the mean of ``|grad f~|^2`` over k rounds is at most ``2 Psi^0/(gamma k)``, also where
f~ is not convex.

Where this differs from its papers: EF21's Theorem 1 has ``1/(L + S sqrt(beta/theta))``,
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

import numpy as np

HALVINGS = 100
"""Of the interval that holds the rate: to the last bit."""


class DianaRate(NamedTuple):
    """What DIANA promises: ``E Psi`` shrinks by ``1 - contraction`` in every round.

    ``step`` is gamma, ``weights`` are t_i, [clients], 0 where a client adds no noise.
    """

    step: float
    contraction: float
    weights: np.ndarray


def best_diana(
    parts: np.ndarray,
    smooth: float,
    convex: float,
    variances: np.ndarray,
    rates: np.ndarray,
) -> DianaRate:
    """The step with the best rate for given memories.

    Args:
        parts: l_i of every client.
        smooth: L_alpha, above 0.
        convex: mu_alpha, above 0.
        variances: omega_i.
        rates: b_i, at most 1/(omega_i + 1).
    """
    noisy = parts * variances > 0
    if not noisy.any():
        return DianaRate(1 / smooth, convex / smooth, np.zeros(len(parts)))
    noise = (parts * variances)[noisy] / len(parts)
    fast, omega = rates[noisy], variances[noisy]

    def bound(contraction: float) -> float:
        factor, _ = factor_and_weight(fast, omega, contraction)
        return smooth + float((noise * factor).max())

    low, high = 0.0, float(fast.min())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle * bound(middle) <= convex:
            low = middle
        else:
            high = middle
    weights = np.zeros(len(parts))
    weights[noisy] = factor_and_weight(fast, omega, low)[1]
    return DianaRate(1 / bound(low), low, weights)


def factor_and_weight(
    rates: np.ndarray, variances: np.ndarray, contraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """The q and t of this module's text, for ``contraction`` r below all rates b."""
    a = rates - contraction
    e = rates * np.maximum(1 - rates * (1 + variances), 0)
    root = np.sqrt(a * rates + e * contraction)
    factor = (a * (a - e) + rates * (a + e) + 2 * a * root) / (a + e) ** 2
    return factor, (1 + a / root) / (a + e)


def contraction(delta: float) -> tuple[float, float]:
    """The pair theta, beta of compressors that contract by ``delta``, in (0, 1]."""
    theta = 1 - math.sqrt(1 - delta)
    return theta, (1 - delta) / theta


def longest_with_feedback(
    smooth: float, spread: float, convex: float, delta: float
) -> float:
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


def feedback_weight(step: float, convex: float, delta: float) -> float:
    """``gamma/(2 (theta - gamma mu))``: of the error in Psi, for EF21."""
    theta, _ = contraction(delta)
    return step / (2 * (theta - step * convex))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DIANA's step and rate, with the weights of its Lyapunov function chosen best.

Notation of ``steps``: f~_i is l_i-smooth and convex, f~ is L_alpha-smooth and
mu_alpha-strongly convex, memories follow at rates ``b_i <= 1/(omega_i + 1)``. Write
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
"""

from typing import NamedTuple

import numpy as np

HALVINGS = 100
"""Of the interval that holds the rate: to the last bit."""


class Guarantee(NamedTuple):
    """What DIANA promises: ``E Psi`` shrinks by ``1 - contraction`` in every round.

    ``step`` is gamma, ``weights`` are t_i, [clients], 0 where a client adds no noise.
    """

    step: float
    contraction: float
    weights: np.ndarray


def best(
    parts: np.ndarray,
    smooth: float,
    convex: float,
    variances: np.ndarray,
    rates: np.ndarray,
) -> Guarantee:
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
        return Guarantee(1 / smooth, convex / smooth, np.zeros(len(parts)))
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
    return Guarantee(1 / bound(low), low, weights)


def factor_and_weight(
    rates: np.ndarray, variances: np.ndarray, contraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """The q and t of this module's text, for ``contraction`` r below all rates b."""
    a = rates - contraction
    e = rates * np.maximum(1 - rates * (1 + variances), 0)
    root = np.sqrt(a * rates + e * contraction)
    factor = (a * (a - e) + rates * (a + e) + 2 * a * root) / (a + e) ** 2
    return factor, (1 + a / root) / (a + e)

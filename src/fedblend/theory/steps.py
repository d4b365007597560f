# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Step sizes that theory allows for solving FLIX.

f~_i is ``l_i = alpha_i^2 L_i`` smooth. With n clients, compressors of variance omega_i
that are drawn independently by each client, and memories that follow at rates b_i::

    DGD                    1/L_alpha
    DCGD                   1/(L_alpha + 2 max(l_i omega_i)/n)
    DIANA                  1/(L_alpha + max(l_i omega_i q_i)/n), b_i <= 1/(omega_i+1)
    DCGD, only convex      a quarter of the above
    DIANA, only convex     a quarter of 1/(L_alpha + 2 max(l_i omega_i)/n
                             + 4 max(b_i omega_i l_i)/(n min b_i))
    accelerated            1/L_alpha with momentum (sqrt(kappa) - 1)/(sqrt(kappa) + 1)
    perm-k                 1/(2 max l_i); half of it, only convex
    EF21, EF21-P           the root of a quadratic equation, see below

q_i is between 1 and 4 where kappa is large, which is derived below. Where all
alpha_i are 0, f~ is constant and steps are 0.

Perm-k: every entry of the mean comes from one client, drawn uniformly, so that the mean
square of what arrives is ``mean |grad f~_i(x)|^2``: the inequality ``E |error|^2 <= A
mean |v_i|^2 - B |mean v_i|^2`` of Szlendak, Tyurin, Richtárik, 2021, arXiv:2110.03300,
is an equality with A = B = 1. As ``|grad f~_i(x)|^2 <= 2 |grad f~_i(x) - grad
f~_i(x*)|^2 + 2 |grad f~_i(x*)|^2``, with ``gamma <= 1/(2 max l_i)``::

    E |x+ - x*|^2 <= (1 - gamma mu) |x - x*|^2 + 2 gamma^2 mean |grad f~_i(x*)|^2

Like DCGD's, its answers have no memory, and a constant step ends in a neighborhood.

Accelerated: Nesterov's method for constants that are known, ``x+ = y - grad f~(y)/L``,
``y+ = x+ + momentum (x+ - x)``: Nesterov, "Lectures on convex optimization", 2018,
section 2.2. Momentum at the server as optax has it runs the same y.

Where this differs from the paper: its strongly convex DIANA has the step of the convex
one times 4, which is smaller. Reference and numbers of theorems: see ``constants``.

The rates of DIANA, EF21 and EF21-P follow from Lyapunov functions with the best
weights.

**DIANA.** f~_i is l_i-smooth and convex, f~ is L_alpha-smooth
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
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend.checks import ALPHA, NOT_NEGATIVE, Instance, Number, each_client, gate
from fedblend.errors import UserError
from fedblend.theory.constants import (
    L_alpha,
    Smoothness,
    alpha_squares,
    client_values,
    mu_alpha,
    smoothness_of_parts,
)

KNOWN = {"alpha": ALPHA, "smoothness": Instance(Smoothness, "a Smoothness")}


@gate(**KNOWN)
def dgd(alpha, smoothness: Smoothness) -> float:
    """Distributed gradient descent: ``1/L_alpha`` (Theorem 2)."""
    return _inverse(L_alpha(alpha, smoothness))


def scale_step(step: float, alpha: Any) -> Any:
    """``step/alpha^2``: what a step for alpha = 1 becomes at one other alpha for all.

    All steps of this module are like that, so that alpha may be a traced number, as in
    ``tune``. At alpha = 0, where nothing moves, it is the step itself.

    >>> scale_step(0.5, 0.25).item()
    8.0
    """
    return step / jnp.where(alpha > 0, jnp.square(alpha), 1.0)


class Solver(NamedTuple):
    """A solver of f~ by its name in this module, and its compressors.

    "dgd", "accelerated" and "perm_k" have none; "dcgd" and "diana" have ``omega``,
    "ef21" and "downlink" have ``delta``.
    """

    name: str = "dgd"
    omega: float | np.ndarray | None = 0.0
    memory_rate: float | np.ndarray | None = None
    delta: float | np.ndarray | None = None


DGD = Solver()
"""Gradient descent, uncompressed."""


class DianaRate(NamedTuple):
    """What DIANA promises: ``E Psi`` shrinks by ``1 - contraction`` in every round.

    ``step`` is gamma, ``weights`` are t_i, [clients], 0 where a client adds no noise.
    """

    step: float
    contraction: float
    weights: np.ndarray


class Accelerated(NamedTuple):
    """The step and the momentum of accelerated gradient descent."""

    rate: float
    momentum: float


@gate(**KNOWN)
def accelerated(alpha, smoothness: Smoothness) -> Accelerated:
    """Accelerated gradient descent, strongly convex: 1/L_alpha and its momentum."""
    require_strongly_convex(alpha, smoothness, "accelerated")
    top = L_alpha(alpha, smoothness)
    root = math.sqrt(mu_alpha(alpha, smoothness) / top) if top > 0 else 1.0
    return Accelerated(_inverse(top), (1 - root) / (1 + root))


@gate(**KNOWN)
def perm_k(alpha, smoothness: Smoothness) -> float:
    """Perm-k without memories, strongly convex: ``1/(2 max l_i)``."""
    require_strongly_convex(alpha, smoothness, "perm_k")
    return 2 * perm_k_convex(alpha, smoothness)


@gate(**KNOWN)
def perm_k_convex(alpha, smoothness: Smoothness) -> float:
    """Perm-k without memories, convex: ``1/(4 max l_i)``."""
    return _inverse(4 * float(smoothness_of_parts(alpha, smoothness).max()))


@gate(**KNOWN)
def ef21(alpha, smoothness: Smoothness, delta) -> float:
    """EF21, for any mu and also where f_i are not convex; see below.

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        delta: how much the compressors contract, a number or one for every client.
    """
    parts = smoothness_of_parts(alpha, smoothness)
    least = least_contraction(delta, len(parts))
    if not parts.any():
        return 0.0
    spread = math.sqrt(float(np.mean(parts**2)))
    own = L_alpha(alpha, smoothness), spread, mu_alpha(alpha, smoothness)
    return longest_with_feedback(*own, least)


@gate(**KNOWN)
def downlink(alpha, smoothness: Smoothness, delta: float) -> float:
    """EF21-P: gradient descent, compressed broadcasts. Arguments as for ``ef21``."""
    least, top = least_contraction(delta, 1), L_alpha(alpha, smoothness)
    if top == 0:
        return 0.0
    return longest_with_feedback(top, top, mu_alpha(alpha, smoothness), least)


@gate(**KNOWN)
def dcgd(alpha, smoothness: Smoothness, omega) -> float:
    """Compressed gradient descent, strongly convex (Theorem 4).

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        omega: the compressors' variance, a number or one for every client.
    """
    require_strongly_convex(alpha, smoothness, "dcgd")
    return _inverse(_dcgd_bound(alpha, smoothness, omega))


@gate(**KNOWN)
def dcgd_convex(alpha, smoothness: Smoothness, omega) -> float:
    """Compressed gradient descent, convex (Theorem 6). Arguments as for ``dcgd``."""
    return _inverse(_dcgd_bound(alpha, smoothness, omega)) / 4


@gate(**KNOWN)
def diana(alpha, smoothness: Smoothness, omega, memory_rate=None) -> float:
    """DIANA, strongly convex: Theorem 5 with a longer step, see below.

    Args:
        alpha: the weight of the shared model, a number or one for every client.
        smoothness: of all f_i.
        omega: the compressors' variance, a number or one for every client.
        memory_rate: b, how fast memories follow, a number or one for every client; by
            default the fastest allowed, 1/(omega + 1).
    """
    return diana_guarantee(alpha, smoothness, omega, memory_rate).step


@gate(**KNOWN)
def diana_guarantee(
    alpha, smoothness: Smoothness, omega, memory_rate=None
) -> DianaRate:
    """The step of ``diana``, what a round contracts by, and the Lyapunov weights.

    Arguments as for ``diana``.
    """
    require_strongly_convex(alpha, smoothness, "diana")
    parts = smoothness_of_parts(alpha, smoothness)
    own = variances(omega, len(parts))
    rates = memory_rates(omega, len(parts), memory_rate)
    if not parts.any():
        return DianaRate(0.0, 1.0, np.zeros(len(parts)))
    smooth, convex = L_alpha(alpha, smoothness), mu_alpha(alpha, smoothness)
    return best_diana(parts, smooth, convex, own, rates)


@gate(**KNOWN)
def diana_convex(alpha, smoothness: Smoothness, omega, memory_rate=None) -> float:
    """DIANA, convex (Theorem 7). Arguments as for ``diana``."""
    return _inverse(_diana_bound(alpha, smoothness, omega, memory_rate)) / 4


def variances(omega, clients: int) -> np.ndarray:
    """The omega of every client, which must be that of an unbiased compressor."""
    if omega is None:
        raise UserError("omega", omega, "a variance: theory is for unbiased ones")
    return client_values("omega", omega, clients, each_client(NOT_NEGATIVE))


def least_contraction(delta, clients: int) -> float:
    """The smallest delta of the clients, which must be that of a contraction."""
    if delta is None:
        raise UserError("delta", delta, "a contraction: theory is for those that do")
    rule = Number(above=0, most=1, clients=True)
    return float(client_values("delta", delta, clients, rule).min())


def memory_rates(omega, clients: int, memory_rate=None) -> np.ndarray:
    """The b of every client, at most ``1/(omega_i + 1)``, which is the default."""
    limit = 1 / (variances(omega, clients) + 1)
    if memory_rate is None:
        return limit
    rates = client_values("memory_rate", memory_rate, clients)
    wrong = np.flatnonzero(~((rates > 0) & (rates <= limit * (1 + 1e-12))))
    if wrong.size:
        at = wrong[0]
        raise ValueError(
            f"memory_rate: {rates[at]:g} is not in (0, 1/(omega + 1)] = "
            f"(0, {limit[at]:g}] at client {at}"
        )
    return rates


def require_strongly_convex(alpha, smoothness: Smoothness, name: str) -> None:
    """Refuse a mixture with mu_alpha = 0, unless all alpha are 0."""
    squared = alpha_squares(alpha, smoothness)
    if squared.any() and mu_alpha(alpha, smoothness) <= 0:
        raise ValueError(f"{name}: needs strong convexity, but mu_alpha is 0")


def _inverse(bound: float) -> float:
    return 1 / bound if bound > 0 else 0.0


def _noise(alpha, smoothness: Smoothness, omega) -> float:
    """``max(l_i omega_i)/n``."""
    parts = smoothness_of_parts(alpha, smoothness)
    return float((parts * variances(omega, len(parts))).max()) / len(parts)


def _dcgd_bound(alpha, smoothness: Smoothness, omega) -> float:
    return L_alpha(alpha, smoothness) + 2 * _noise(alpha, smoothness, omega)


def _diana_bound(alpha, smoothness: Smoothness, omega, memory_rate) -> float:
    rates = memory_rates(omega, len(smoothness.smooth), memory_rate)
    remembered = _noise(alpha, smoothness, rates * np.asarray(omega, np.float64))
    return _dcgd_bound(alpha, smoothness, omega) + 4 * remembered / float(rates.min())


HALVINGS = 100
"""Of the interval that holds the rate: to the last bit."""


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

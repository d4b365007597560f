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
    EF21, EF21-P           the root of a quadratic equation, see ``lyapunov``

q_i is between 1 and 4 where kappa is large, and ``lyapunov`` derives it. Where all
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
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend.checks import (
    ALPHA,
    NOT_NEGATIVE,
    Instance,
    Number,
    by_client,
    gate,
)
from fedblend.errors import UserError
from fedblend.theory.constants import (
    L_alpha,
    Smoothness,
    mu_alpha,
    per_client,
    smoothness_of_parts,
    squared_alpha,
)
from fedblend.theory.lyapunov import DianaRate, best_diana, longest_with_feedback

KNOWN = {"alpha": ALPHA, "smoothness": Instance(Smoothness, "a Smoothness")}


@gate(**KNOWN)
def dgd(alpha, smoothness: Smoothness) -> float:
    """Distributed gradient descent: ``1/L_alpha`` (Theorem 2)."""
    return _inverse(L_alpha(alpha, smoothness))


def at_alpha(step: float, alpha: Any) -> Any:
    """``step/alpha^2``: what a step for alpha = 1 becomes at one other alpha for all.

    All steps of this module are like that, so that alpha may be a traced number, as in
    ``tune``. At alpha = 0, where nothing moves, it is the step itself.

    >>> at_alpha(0.5, 0.25).item()
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
    """EF21, for any mu and also where f_i are not convex; see ``lyapunov``.

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
    """DIANA, strongly convex: Theorem 5 with a longer step, see ``lyapunov``.

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
    return per_client("omega", omega, clients, by_client(NOT_NEGATIVE))


def least_contraction(delta, clients: int) -> float:
    """The smallest delta of the clients, which must be that of a contraction."""
    if delta is None:
        raise UserError("delta", delta, "a contraction: theory is for those that do")
    rule = Number(above=0, most=1, clients=True)
    return float(per_client("delta", delta, clients, rule).min())


def memory_rates(omega, clients: int, memory_rate=None) -> np.ndarray:
    """The b of every client, at most ``1/(omega_i + 1)``, which is the default."""
    limit = 1 / (variances(omega, clients) + 1)
    if memory_rate is None:
        return limit
    rates = per_client("memory_rate", memory_rate, clients)
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
    squared = squared_alpha(alpha, smoothness)
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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Bounds on FLIX's objective: at x_avg, after k rounds of a solver, and measured.

One round is enough for small alpha: x_avg is good by itself (``one_shot``). For
minimizers x_i, ``x_avg = sum w_i x_i`` with ``w_i ~ alpha_i^2 L_i`` (Theorem 1)::

    f~(x_avg) - min f~ <= f~(x_avg) - mean f_i(x_i) <= L_alpha V/2

and all bounds on solvers follow from it: ``|x_avg - x*|^2 <= L_alpha V/mu_alpha``, and,
as ``|grad f~_i(x)|^2 <= 2 l_i (f_i(T_i(x)) - f_i(x_i))`` with ``l_i = alpha_i^2 L_i``::

    mean omega_i |grad f~_i(x*)|^2 <= max(omega_i l_i) L_alpha V

None holds for x_i that are not minimizers: see ``require_minimizers``.

A certificate is measured on the way and as a rule far smaller. f~ is mu_alpha-strongly
convex, so that for any shared model, whatever found it::

    f~(x) - min f~ <= |grad f~(x)|^2 / (2 mu_alpha)

f~ is that of the local models x_i which the run has: it need not know their distance
from true minimizers.

Where this differs from the paper: unequal alpha use ``L_alpha V/2``, which is never
larger than its ``max alpha^2 mean(L_i) D/2`` with ``D = max |x_i - x_j|^2`` (the proofs
square it, the statements do not). Corollary 1, on the neighborhood of DCGD, loses a
factor max L_i in the proof (the gradient's Lipschitz constant enters squared); the
bound above needs neither D nor mu. It holds for memories of DIANA that start at 0 or at
the gradient alike, so both starts share a bound. Reference and numbers of theorems: see
``constants``.
"""

import math
from typing import NamedTuple

import numpy as np

from fedblend.checks import POSITIVE
from fedblend.errors import SettingError
from fedblend.theory import constants, steps
from fedblend.theory.constants import MixtureConstants, Smoothness, alpha_squares
from fedblend.theory.steps import feedback_weight


def require_minimizers(gradient_norms, tolerance: float = 1e-6) -> None:
    """Refuse pure local models that do not minimize f_i, by their gradient norms.

    A client with one class and no l2 has no minimizer, and bounds by V, D or min f_i do
    not hold for it.
    """
    norms = np.asarray(gradient_norms, np.float64)
    wrong = np.flatnonzero(~(norms <= tolerance))
    if wrong.size:
        raise ValueError(
            f"personal: client {wrong[0]} has gradient norm {norms[wrong[0]]:.2g}, "
            f"over {tolerance:g} ({wrong.size} of {norms.size} clients): no bound holds"
        )


def one_shot(known: MixtureConstants) -> float:
    """``f~(x_avg) - min f~ <= L_alpha V/2`` (Theorem 1; for equal alpha b^2 L V/2)."""
    return known.L_alpha * known.V / 2


def start_at_gap(known: MixtureConstants, gap: float) -> MixtureConstants:
    """The constants with V such that every bound starts at ``gap`` and not L_alpha V/2.

    All bounds use V for one thing only, ``f~(x_avg) - mean f_i(x_i) <= L_alpha V/2``.
    Who has the rows measures the left side, which is far smaller.

    Args:
        known: constants of f~.
        gap: a bound on ``f~(x_avg) - mean min f_i``; where it is larger than that by V,
            nothing changes.
    """
    if known.L_alpha == 0:
        return known
    return known._replace(V=min(2 * gap / known.L_alpha, known.V))


ROUNDING = 1e-9
"""A bound that misses eps by this fraction meets it."""
MOST_ROUNDS = 10**12
"""A bound that needs more rounds promises nothing."""


class Bound(NamedTuple):
    """A geometric bound: at most ``start * factor**k + floor`` after k rounds.

    ``at_start`` bounds the starting point itself, often better than ``start + floor``.
    """

    start: float
    factor: float
    floor: float
    at_start: float

    def value(self, rounds) -> np.ndarray:
        """The bound after these numbers of rounds."""
        rounds = np.asarray(rounds)
        later = self.start * self.factor ** np.asarray(rounds, np.float64) + self.floor
        return np.where(rounds == 0, self.at_start, later)

    def rounds_to(self, eps: float) -> int | None:
        """The rounds after which the bound is at most eps; None if it never is."""
        enough = POSITIVE("eps", eps) * (1 + ROUNDING)
        if self.at_start <= enough:
            return 0
        if self.value(1) <= enough:
            return 1
        if self.factor >= 1 or self.floor >= enough:
            return None
        needed = math.log((enough - self.floor) / self.start) / math.log(self.factor)
        if needed > MOST_ROUNDS:
            return None
        rounds = max(math.ceil(needed), 2)
        # The logarithm may be off by a round.
        near = (k for k in (rounds - 1, rounds) if self.value(k) <= enough)
        return next(near, rounds + 1)


def dgd(known: MixtureConstants) -> Bound:
    """``f~(x^k) - min f~ <= (1 - mu_alpha/L_alpha)^k L_alpha V/2`` (Theorem 2)."""
    factor = 1 - known.mu_alpha / known.L_alpha if known.L_alpha > 0 else 0.0
    return Bound(one_shot(known), max(factor, 0.0), 0.0, one_shot(known))


def diana(known: MixtureConstants, omega, memory_rate=None) -> Bound:
    """DIANA at ``steps.diana``: E f~(x^k) - min f~ (Theorem 5 and Corollary 2).

    ``L_alpha/2 (1 - r)^k Psi^0`` with r and the Lyapunov function Psi of
    ``steps``. Memories start at 0 or at the gradient. Without compression
    memories have no weight in it, and it is gradient descent.
    """
    found = steps.diana_guarantee(known.alpha, known.smoothness, omega, memory_rate)
    if found.step == 0:
        return Bound(0.0, 0.0, 0.0, 0.0)
    weighted = steps.variances(omega, known.clients) * found.weights
    memories = memory_noise(known, weighted)
    start = start_distance(known) + found.step**2 / known.clients * memories
    factor = 1 - found.contraction
    return Bound(known.L_alpha / 2 * start, factor, 0.0, one_shot(known))


def accelerated(known: MixtureConstants) -> Bound:
    """Accelerated gradient descent at ``steps.accelerated``, from x_avg.

    With ``q = sqrt(mu_alpha/L_alpha)``, Nesterov's Lyapunov function ``E_k = f~(x^k) -
    min f~ + mu_alpha/2 |z^k - x*|^2`` shrinks by 1 - q and starts at 2 (f~(x_avg) - min
    f~) at most. Clients have ``y^k = (x^k + q z^k)/(1 + q)``, where convexity and
    smoothness bound f~ by ``E_k/(q (1 + q))``: one factor sqrt(kappa) for that.
    """
    if known.L_alpha == 0:
        return Bound(0.0, 0.0, 0.0, 0.0)
    start = one_shot(known) * acceleration_excess(known)
    root = math.sqrt(known.mu_alpha / known.L_alpha)
    return Bound(start, 1 - root, 0.0, one_shot(known))


def acceleration_excess(known: MixtureConstants) -> float:
    """``2/(q (1 + q))``: the bound of acceleration over f~(x_avg) - min f~."""
    steps.require_strongly_convex(known.alpha, known.smoothness, "accelerated")
    root = math.sqrt(known.mu_alpha / known.L_alpha) if known.L_alpha > 0 else 1.0
    return 2 / (root * (1 + root))


def ef21(known: MixtureConstants, delta) -> Bound:
    """EF21 at ``steps.ef21``: E f~(x^k) - min f~.

    ``(1 - gamma mu_alpha)^k Psi^0`` with Psi of ``steps``. The first estimates are
    compressed gradients, so that their errors have a mean square of at most ``(1 -
    delta) mean |grad f~_i(x_avg)|^2 <= (1 - delta) max(l_i) L_alpha V``.
    """
    step = steps.ef21(known.alpha, known.smoothness, delta)
    if step == 0:
        return Bound(0.0, 0.0, 0.0, 0.0)
    least = steps.least_contraction(delta, known.clients)
    if least == 1:
        return dgd(known)
    error = (1 - least) * memory_noise(known, 1.0)
    weight = feedback_weight(step, known.mu_alpha, least)
    factor = 1 - step * known.mu_alpha
    return Bound(one_shot(known) + weight * error, factor, 0.0, one_shot(known))


def start_distance(known: MixtureConstants) -> float:
    """``|x_avg - x*|^2 <= L_alpha V/mu_alpha`` (Proposition 5)."""
    steps.require_strongly_convex(known.alpha, known.smoothness, "start_distance")
    return known.L_alpha * known.V / known.mu_alpha if known.mu_alpha > 0 else 0.0


def memory_noise(known: MixtureConstants, omega) -> float:
    """``mean omega_i |h_i - grad f~_i(x*)|^2 <= max(omega_i l_i) L_alpha V``.

    For memories h_i = 0, and for h_i the gradients at x_avg.
    """
    parts = constants.smoothness_of_parts(known.alpha, known.smoothness)
    worst = float((steps.variances(omega, known.clients) * parts).max())
    return worst * known.L_alpha * known.V


RESOLUTION = {"float32": 1e-5, "float64": 1e-13}
"""The smallest difference of objectives of about 1 that sums in a precision resolve."""


class Certificate(NamedTuple):
    """What is known of a shared model; ``objective - min f~ <= gap``."""

    objective: float
    """f~, with its l2 penalty."""
    gradient_norm: float
    """|grad f~|."""
    gap: float
    """``gradient_norm**2 / (2 mu)``."""


def certify(objective: float, gradient_norm: float, mu: float) -> Certificate:
    """The certificate of an objective with these numbers at some point.

    Args:
        objective: its value.
        gradient_norm: the norm of its gradient.
        mu: it is strongly convex with this.

    >>> certify(0.7, 0.1, mu=0.5).gap
    0.010000000000000002
    """
    gap = gradient_norm**2 / (2 * POSITIVE("mu", mu))
    return Certificate(objective, gradient_norm, gap)


def mean_mu(alpha, known: Smoothness, weights: np.ndarray) -> float:
    """``sum w_i alpha_i^2 mu_i / sum w_i``, which is mu_alpha where weights are equal.

    The strong convexity of ``sum w_i f_i(alpha_i x + (1-alpha_i) x_i) / sum w_i``.
    """
    return float(
        np.average(alpha_squares(alpha, known) * known.convex, weights=weights)
    )


def require_resolved(key: str, eps: float, precision: str) -> None:
    """Refuse an accuracy that is lost in rounding; ``key`` is where it was given."""
    least = RESOLUTION[precision]
    if eps < least:
        better = "" if precision == "float64" else '; run.precision = "float64" does'
        lost = f"{eps:g} is below {least:g}: {precision} does not resolve it{better}"
        raise SettingError(key, lost)

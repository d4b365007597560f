# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Bounds on FLIX's objective at x_avg, and after k rounds of a solver from there.

One round is enough for small alpha: x_avg is good by itself (``one_shot``). For
minimizers x_i, ``x_avg = sum w_i x_i`` with ``w_i ~ alpha_i^2 L_i`` (Theorem 1)::

    f~(x_avg) - min f~ <= f~(x_avg) - mean f_i(x_i) <= L_alpha V/2

and all bounds on solvers follow from it: ``|x_avg - x*|^2 <= L_alpha V/mu_alpha``, and,
as ``|grad f~_i(x)|^2 <= 2 l_i (f_i(T_i(x)) - f_i(x_i))`` with ``l_i = alpha_i^2 L_i``::

    mean omega_i |grad f~_i(x*)|^2 <= max(omega_i l_i) L_alpha V

None holds for x_i that are not minimizers: see ``require_minimizers``. For stationary
points of f_i that may be nonconvex, ``w_i ~ alpha_i^4 L_i^2`` (Theorem 3)::

    |grad f~(x_avg)|^2 <= mean (alpha_i^2 L_i)^2 V'

Where this differs from the paper: unequal alpha use ``L_alpha V/2``, which is never
larger than its ``max alpha^2 mean(L_i) D/2`` (``dgd_by_diameter``), and the line above,
which is never larger than the printed form with D. The statement of Theorem 3 repeats
the condition of Theorem 1; its proof has ``(eps^2/(M D))^(1/4)``, used here, and V' is
the variance under its own weights. Corollary 1, on the neighborhood of DCGD, loses a
factor max L_i in the proof (the gradient's Lipschitz constant enters squared); the
bound above needs neither D nor mu. It holds for memories of DIANA that start at 0 or at
the gradient alike, so both starts share a bound. Reference and numbers of theorems: see
``constants``.
"""

import math
from typing import NamedTuple

import numpy as np

from fedblend.checks import POSITIVE, WHOLE, gate, words
from fedblend.core import PyTree
from fedblend.theory import constants, error_feedback, steps
from fedblend.theory.constants import Mixture, Smoothness


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


def one_shot(known: Mixture) -> float:
    """``f~(x_avg) - min f~ <= L_alpha V/2`` (Theorem 1; for equal alpha b^2 L V/2)."""
    return known.L_alpha * known.V / 2


def measured(known: Mixture, gap: float) -> Mixture:
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


def one_shot_by_diameter(known: Mixture) -> float:
    """``max alpha^2 mean(L_i) D/2``: Theorem 1 as printed for unequal alpha."""
    return float(known.alpha.max()) ** 2 * known.mean_smooth * known.D / 2


def one_shot_alpha(eps: float, smoothness: Smoothness, spread: float) -> float:
    """The largest alpha with which x_avg is eps-optimal: ``sqrt(2 eps/(L spread))``.

    Args:
        eps: allowed distance of f~(x_avg) from the smallest value.
        smoothness: of all f_i; L is the mean of L_i.
        spread: V if all alpha are equal, D if they only are at most this.
    """
    return _capped(
        2 * POSITIVE("eps", eps), float(smoothness.smooth.mean()) * spread, 1 / 2
    )


def one_shot_gradient(alpha, smoothness: Smoothness, personal: PyTree) -> float:
    """``|grad f~(x_avg)| <= sqrt(mean l_i^2 V')`` for stationary points (Theorem 3).

    V' and x_avg are those under ``stationary_weights``; f_i need not be convex.
    """
    own = constants.stationary_weights(alpha, smoothness)
    squares = constants.smoothness_of_parts(alpha, smoothness) ** 2
    return math.sqrt(float(np.mean(squares)) * constants.V(personal, own))


def one_shot_gradient_by_diameter(
    alpha, smoothness: Smoothness, personal: PyTree
) -> float:
    """``max alpha^2 sqrt(M D)``: Theorem 3 as proved for unequal alpha."""
    largest = float(constants.squared_alpha(alpha, smoothness).max())
    return largest * math.sqrt(constants.M(smoothness) * constants.D(personal))


def one_shot_gradient_alpha(eps: float, smoothness: Smoothness, spread: float) -> float:
    """The largest alpha with ``|grad f~(x_avg)| <= eps``: ``(eps^2/(M spread))^(1/4)``.

    ``spread`` is V' (see ``one_shot_gradient``) if all alpha are equal, else D.
    """
    return _capped(POSITIVE("eps", eps) ** 2, constants.M(smoothness) * spread, 1 / 4)


def _capped(top: float, bottom: float, power: float) -> float:
    """``(top/bottom)^power``, at most 1, and 1 where bottom is 0."""
    return min((top / bottom) ** power, 1.0) if bottom > 0 else 1.0


class Curve(NamedTuple):
    """A geometric bound: at most ``start * factor**k + floor`` after k rounds.

    ``at_start`` bounds the starting point itself, often better than ``start + floor``.
    """

    start: float
    factor: float
    floor: float
    at_start: float

    def after(self, rounds) -> np.ndarray:
        """The bound after these numbers of rounds."""
        rounds = np.asarray(rounds)
        later = self.start * self.factor ** np.asarray(rounds, np.float64) + self.floor
        return np.where(rounds == 0, self.at_start, later)


def dgd(known: Mixture) -> Curve:
    """``f~(x^k) - min f~ <= (1 - mu_alpha/L_alpha)^k L_alpha V/2`` (Theorem 2)."""
    return _descent(known, one_shot(known))


def dgd_by_diameter(known: Mixture) -> Curve:
    """``(1 - mu_alpha/L_alpha)^k max alpha^2 mean(L_i) D/2``: Theorem 2 as printed."""
    return _descent(known, one_shot_by_diameter(known))


def _descent(known: Mixture, start: float) -> Curve:
    factor = 1 - known.mu_alpha / known.L_alpha if known.L_alpha > 0 else 0.0
    return Curve(start, max(factor, 0.0), 0.0, start)


def dcgd(known: Mixture, omega) -> Curve:
    """DCGD at ``steps.dcgd``: E f~(x^k) - min f~, to a neighborhood (Theorem 4).

    ``L_alpha/2 ((1 - gamma mu_alpha)^k |x_avg - x*|^2 + gamma sigma/mu_alpha)`` with
    ``sigma = 2/n mean omega_i |grad f~_i(x*)|^2``, bounded as in this module's text.
    """
    step = steps.dcgd(known.alpha, known.smoothness, omega)
    if step == 0:
        return Curve(0.0, 0.0, 0.0, 0.0)
    sigma = 2 / known.clients * memory_noise(known, omega)
    return Curve(
        start=known.L_alpha / 2 * start_distance(known),
        factor=max(1 - step * known.mu_alpha, 0.0),
        floor=known.L_alpha / 2 * step * sigma / known.mu_alpha,
        at_start=one_shot(known),
    )


def diana(known: Mixture, omega, memory_rate=None) -> Curve:
    """DIANA at ``steps.diana``: E f~(x^k) - min f~ (Theorem 5 and Corollary 2).

    ``L_alpha/2 (1 - r)^k Psi^0`` with r and the Lyapunov function Psi of
    ``theory.diana``. Memories start at 0 or at the gradient. Without compression
    memories have no weight in it, and it is gradient descent.
    """
    found = steps.diana_guarantee(known.alpha, known.smoothness, omega, memory_rate)
    if found.step == 0:
        return Curve(0.0, 0.0, 0.0, 0.0)
    weighted = steps.variances(omega, known.clients) * found.weights
    memories = memory_noise(known, weighted)
    start = start_distance(known) + found.step**2 / known.clients * memories
    factor = 1 - found.contraction
    return Curve(known.L_alpha / 2 * start, factor, 0.0, one_shot(known))


def accelerated(known: Mixture) -> Curve:
    """Accelerated gradient descent at ``steps.accelerated``, from x_avg.

    With ``q = sqrt(mu_alpha/L_alpha)``, Nesterov's Lyapunov function ``E_k = f~(x^k) -
    min f~ + mu_alpha/2 |z^k - x*|^2`` shrinks by 1 - q and starts at 2 (f~(x_avg) - min
    f~) at most. Clients have ``y^k = (x^k + q z^k)/(1 + q)``, where convexity and
    smoothness bound f~ by ``E_k/(q (1 + q))``: one factor sqrt(kappa) for that.
    """
    if known.L_alpha == 0:
        return Curve(0.0, 0.0, 0.0, 0.0)
    start = one_shot(known) * accelerated_excess(known)
    root = math.sqrt(known.mu_alpha / known.L_alpha)
    return Curve(start, 1 - root, 0.0, one_shot(known))


def accelerated_excess(known: Mixture) -> float:
    """``2/(q (1 + q))``: the bound of acceleration over f~(x_avg) - min f~."""
    steps.require_strongly_convex(known.alpha, known.smoothness, "accelerated")
    root = math.sqrt(known.mu_alpha / known.L_alpha) if known.L_alpha > 0 else 1.0
    return 2 / (root * (1 + root))


def perm_k(known: Mixture) -> Curve:
    """Perm-k at ``steps.perm_k``: E f~(x^k) - min f~, to a neighborhood.

    ``L_alpha/2 ((1 - gamma mu_alpha)^k |x_avg - x*|^2 + 2 gamma sigma/mu_alpha)`` with
    ``sigma = mean |grad f~_i(x*)|^2``, bounded as in this module's text.
    """
    step = steps.perm_k(known.alpha, known.smoothness)
    if step == 0:
        return Curve(0.0, 0.0, 0.0, 0.0)
    return Curve(
        start=known.L_alpha / 2 * start_distance(known),
        factor=max(1 - step * known.mu_alpha, 0.0),
        floor=known.L_alpha * step * memory_noise(known, 1.0) / known.mu_alpha,
        at_start=one_shot(known),
    )


def ef21(known: Mixture, delta) -> Curve:
    """EF21 at ``steps.ef21``: E f~(x^k) - min f~.

    ``(1 - gamma mu_alpha)^k Psi^0`` with Psi of ``error_feedback``. The first estimates
    are compressed gradients, so that their errors have a mean square of at most ``(1 -
    delta) mean |grad f~_i(x_avg)|^2 <= (1 - delta) max(l_i) L_alpha V``.
    """
    step = steps.ef21(known.alpha, known.smoothness, delta)
    if step == 0:
        return Curve(0.0, 0.0, 0.0, 0.0)
    least = steps.least_contraction(delta, known.clients)
    if least == 1:
        return dgd(known)
    error = (1 - least) * memory_noise(known, 1.0)
    weight = error_feedback.weight(step, known.mu_alpha, least)
    factor = 1 - step * known.mu_alpha
    return Curve(one_shot(known) + weight * error, factor, 0.0, one_shot(known))


def downlink(known: Mixture, delta, distance: float | None = None) -> Curve:
    """EF21-P at ``steps.downlink``: E f~(w^k) - min f~ at the clients' copy w^k.

    ``(1 + L_alpha/(2 c)) (1 - gamma mu_alpha)^k Psi^0`` with Psi of ``error_feedback``
    and c the weight of its error: ``f~(w) - min f~ <= (sqrt(f~(x) - min f~) +
    sqrt(L_alpha/2) |x - w|)^2``. x^0 is x_avg, of which clients have what ``C`` leaves
    of the distance to the initial parameters.

    Args:
        known: constants of f~.
        delta: how much the compressor contracts.
        distance: ``|x_avg - initial parameters|^2``; from zero if None.
    """
    step = steps.downlink(known.alpha, known.smoothness, delta)
    if step == 0:
        return Curve(0.0, 0.0, 0.0, 0.0)
    least = steps.least_contraction(delta, 1)
    if least == 1:
        return dgd(known)
    if distance is None:
        distance = float(known.average @ known.average)
    error = (1 - least) * distance
    weight = known.L_alpha**2 * error_feedback.weight(step, known.mu_alpha, least)
    copied = 1 + known.L_alpha / (2 * weight)
    here = (math.sqrt(one_shot(known)) + math.sqrt(known.L_alpha * error / 2)) ** 2
    start = copied * (one_shot(known) + weight * error)
    return Curve(start, 1 - step * known.mu_alpha, 0.0, here)


def start_distance(known: Mixture) -> float:
    """``|x_avg - x*|^2 <= L_alpha V/mu_alpha`` (Proposition 5)."""
    steps.require_strongly_convex(known.alpha, known.smoothness, "start_distance")
    return known.L_alpha * known.V / known.mu_alpha if known.mu_alpha > 0 else 0.0


def memory_noise(known: Mixture, omega) -> float:
    """``mean omega_i |h_i - grad f~_i(x*)|^2 <= max(omega_i l_i) L_alpha V``.

    For memories h_i = 0, and for h_i the gradients at x_avg.
    """
    parts = constants.smoothness_of_parts(known.alpha, known.smoothness)
    worst = float((steps.variances(omega, known.clients) * parts).max())
    return worst * known.L_alpha * known.V


def dcgd_convex(known: Mixture, omega, distance: float, rounds) -> np.ndarray:
    """DCGD at ``steps.dcgd_convex``, for the mean of the iterates (Theorem 6).

    ``2 (f~(x^0) - f~*)/k + |x^0 - x*|^2/(gamma k) + 2 gamma sigma``, for k >= 1.

    Args:
        known: constants of f~.
        omega: the compressors' variance.
        distance: a bound on ``|x_avg - x*|^2``, which no constant of f~ gives here.
        rounds: numbers of rounds.
    """
    step = steps.dcgd_convex(known.alpha, known.smoothness, omega)
    floor = 4 * step / known.clients * memory_noise(known, omega)
    return _averaged(known, step, distance, 0.0, floor, rounds)


def diana_convex(
    known: Mixture, omega, distance: float, rounds, memory_rate=None
) -> np.ndarray:
    """DIANA at ``steps.diana_convex``, for the mean of the iterates (Theorem 7).

    ``(2 (f~(x^0) - f~*) + 4 gamma sigma_0^2/(n min b_i) + |x^0 - x*|^2/gamma)/k``.
    Arguments as for ``dcgd_convex`` and ``diana``.
    """
    step = steps.diana_convex(known.alpha, known.smoothness, omega, memory_rate)
    rate = float(steps.memory_rates(omega, known.clients, memory_rate).min())
    memories = 4 * step / (known.clients * rate) * memory_noise(known, omega)
    return _averaged(known, step, distance, memories, 0.0, rounds)


def _averaged(known, step, distance, memories, floor, rounds) -> np.ndarray:
    if step == 0:
        return np.zeros(np.shape(rounds))
    start = 2 * one_shot(known) + memories + distance / step
    rounds = np.asarray(rounds, np.float64)
    later = start / np.maximum(rounds, 1) + floor
    return np.where(rounds == 0, one_shot(known), later)


def dcgd_nonconvex(
    alpha, smoothness: Smoothness, omega, horizon: int, gap: float, rounds
) -> np.ndarray:
    """The least E |grad f~(x^t)|^2, t < k, at ``steps.dcgd_nonconvex`` (Theorem 8).

    ``2 (1 + 2 L_alpha gamma^2 max(l_i omega_i)/n)^k gap/(gamma k)``; the power is at
    most e up to the horizon, and there is no bound beyond it.

    Args:
        alpha: the weight of the shared model.
        smoothness: of all f_i.
        omega: the compressors' variance.
        horizon: the number of rounds that the step is for.
        gap: a bound on ``f~(x^0) - mean min f_i``.
        rounds: numbers of rounds.
    """
    step = steps.dcgd_nonconvex(alpha, smoothness, omega, horizon)
    parts = constants.smoothness_of_parts(alpha, smoothness)
    noise = float((steps.variances(omega, len(parts)) * parts).max()) / len(parts)
    rounds = np.asarray(rounds, np.float64)
    growth = (1 + 2 * constants.L_alpha(alpha, smoothness) * step**2 * noise) ** rounds
    bound = growth * _gradients(alpha, smoothness, step, gap, rounds)
    return np.where(rounds > horizon, np.inf, bound)


def diana_nonconvex(
    alpha, smoothness: Smoothness, omega, gap: float, rounds, memory_rate=None
) -> np.ndarray:
    """E |grad f~|^2 at a random x^t, t < k, at ``steps.diana_nonconvex`` (Theorem 9).

    ``2 gap/(gamma k)`` with memories that start at the gradient. Arguments as for
    ``dcgd_nonconvex``.
    """
    step = steps.diana_nonconvex(alpha, smoothness, omega, memory_rate)
    return _gradients(alpha, smoothness, step, gap, rounds)


def _gradients(alpha, smoothness, step, gap, rounds) -> np.ndarray:
    """``2 gap/(gamma k)``, and ``2 L_alpha gap`` before the first round."""
    if step == 0:
        return np.zeros(np.shape(rounds))
    rounds = np.asarray(rounds, np.float64)
    later = 2 * gap / (step * np.maximum(rounds, 1))
    return np.where(rounds == 0, 2 * constants.L_alpha(alpha, smoothness) * gap, later)


@gate(rounds=WHOLE)
def predicted(
    solver: str,
    known: Mixture,
    rounds: int,
    omega: float | np.ndarray | None = 0.0,
    memory_rate: float | np.ndarray | None = None,
    delta: float | np.ndarray | None = None,
) -> np.ndarray:
    """The bound on f~(x^k) - min f~ for k = 0 ... rounds, to plot beside a run.

    Args:
        solver: "dgd", "accelerated", "dcgd", "diana", "perm_k", "ef21" or "downlink",
            from x_avg and at its step of ``steps``.
        known: constants of f~.
        rounds: number of rounds.
        omega: the compressors' variance, of "dcgd" and "diana".
        memory_rate: b of DIANA.
        delta: how much compressors contract, of "ef21" and "downlink".
    """
    found = curve(solver, known, omega, memory_rate, delta)
    return found.after(np.arange(rounds + 1))


def curve(
    solver: str,
    known: Mixture,
    omega: float | np.ndarray | None = 0.0,
    memory_rate: float | np.ndarray | None = None,
    delta: float | np.ndarray | None = None,
) -> Curve:
    """The bound of a solver by its name. Arguments as for ``predicted``."""
    by_name = {
        "dgd": lambda: dgd(known),
        "accelerated": lambda: accelerated(known),
        "dcgd": lambda: dcgd(known, omega),
        "diana": lambda: diana(known, omega, memory_rate),
        "perm_k": lambda: perm_k(known),
        "ef21": lambda: ef21(known, delta),
        "downlink": lambda: downlink(known, delta),
    }
    words(*by_name)("solver", solver)
    return by_name[solver]()

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Theory of the FLIX paper beyond what runs and plans of fedblend need.

Steps and bounds that ``fedblend.theory`` uses are there, with their notation. Here are
the printed forms with the diameter D, the one-shot theorem for stationary points,
bounds of solvers that no plan has, the bounds for convex and nonconvex losses, and the
paper's plan of communication.

One-shot, for stationary points of f_i that may be nonconvex, with ``x_avg = sum w_i
x_i``, ``w_i ~ alpha_i^4 L_i^2`` and V' the variance under these weights (Theorem 3)::

    |grad f~(x_avg)|^2 <= mean (alpha_i^2 L_i)^2 V'

Steps without convexity, for T rounds, with ``R^2 = mean l_i^2`` and ``e = (1+omega)
omega (3 + 2 omega)/n``::

    DCGD     min(1/L_alpha, sqrt(n/(2 L_alpha max(l_i omega_i) T)))
    DIANA    min(1/(2 sqrt(e)), 2/(sqrt(1 + 8e) + 1))/R

Where this differs from the paper: the statement of Theorem 3 repeats the condition of
Theorem 1; its proof has ``(eps^2/(M D))^(1/4)``, used here, and V' is the variance
under its own weights. D is a squared distance, as in the proofs; the statements print
it without the square. Nonconvex DCGD in the paper allows 1/L_alpha for any number of
rounds T, with a bound that grows like ``c^T``; the horizon keeps that factor below e.
Nonconvex DIANA in the paper has L_alpha in place of R, which is wrong where one client
is much less smooth than the rest: the proof needs ``mean |grad f~_i(x) - grad
f~_i(y)|^2 <= R^2 |x - y|^2``. Reference and numbers of theorems: see
``fedblend.theory.constants``.
"""

import math
from typing import NamedTuple

import numpy as np

from fedblend.checks import COUNT, FRACTION, POSITIVE, WHOLE, gate
from fedblend.core import PyTree
from fedblend.theory import bounds, constants, steps
from fedblend.theory.bounds import Bound, memory_noise, one_shot, start_distance
from fedblend.theory.constants import (
    L_alpha,
    MixtureConstants,
    Smoothness,
    alpha_squares,
    client_values,
    mixture,
    smoothness_of_parts,
    stack_models,
)
from fedblend.theory.steps import feedback_weight


def D(personal: PyTree) -> float:
    """``max |x_i - x_j|^2``: the largest squared distance of two models."""
    models = stack_models(personal)
    return max(float(((models - own) ** 2).sum(axis=1).max()) for own in models)


def M(smoothness: Smoothness) -> float:
    """``mean L_i^2``, of the one-shot theorem for stationary points (Theorem 3)."""
    return float(np.mean(smoothness.smooth**2))


def stationary_weights(alpha, smoothness: Smoothness) -> np.ndarray:
    """Weights of x_avg for stationary points: ``alpha_i^4 L_i^2``, normalized."""
    squares = smoothness_of_parts(alpha, smoothness) ** 2
    return squares / squares.sum()


def one_shot_by_diameter(known: MixtureConstants, diameter: float) -> float:
    """``max alpha^2 mean(L_i) D/2``: Theorem 1 as printed for unequal alpha."""
    smooth = float(known.smoothness.smooth.mean())
    return float(known.alpha.max()) ** 2 * smooth * diameter / 2


def dgd_by_diameter(known: MixtureConstants, diameter: float) -> Bound:
    """``(1 - mu_alpha/L_alpha)^k max alpha^2 mean(L_i) D/2``: Theorem 2 as printed."""
    start = one_shot_by_diameter(known, diameter)
    return bounds.dgd(known)._replace(start=start, at_start=start)


def one_shot_alpha(eps: float, smoothness: Smoothness, spread: float) -> float:
    """The largest alpha with which x_avg is eps-optimal: ``sqrt(2 eps/(L spread))``.

    Args:
        eps: allowed distance of f~(x_avg) from the smallest value.
        smoothness: of all f_i; L is the mean of L_i.
        spread: V if all alpha are equal, D if they only are at most this.
    """
    bottom = float(smoothness.smooth.mean()) * spread
    return _capped(2 * POSITIVE("eps", eps), bottom, 1 / 2)


def one_shot_gradient(alpha, smoothness: Smoothness, personal: PyTree) -> float:
    """``|grad f~(x_avg)| <= sqrt(mean l_i^2 V')`` for stationary points (Theorem 3)."""
    own = stationary_weights(alpha, smoothness)
    squares = smoothness_of_parts(alpha, smoothness) ** 2
    return math.sqrt(float(np.mean(squares)) * constants.V(personal, own))


def one_shot_gradient_by_diameter(
    alpha, smoothness: Smoothness, personal: PyTree
) -> float:
    """``max alpha^2 sqrt(M D)``: Theorem 3 as proved for unequal alpha."""
    largest = float(alpha_squares(alpha, smoothness).max())
    return largest * math.sqrt(M(smoothness) * D(personal))


def one_shot_gradient_alpha(eps: float, smoothness: Smoothness, spread: float) -> float:
    """The largest alpha with ``|grad f~(x_avg)| <= eps``: ``(eps^2/(M spread))^(1/4)``.

    ``spread`` is V' (see ``one_shot_gradient``) if all alpha are equal, else D.
    """
    return _capped(POSITIVE("eps", eps) ** 2, M(smoothness) * spread, 1 / 4)


def _capped(top: float, bottom: float, power: float) -> float:
    """``(top/bottom)^power``, at most 1, and 1 where bottom is 0."""
    return min((top / bottom) ** power, 1.0) if bottom > 0 else 1.0


def dcgd(known: MixtureConstants, omega) -> Bound:
    """DCGD at ``steps.dcgd``: E f~(x^k) - min f~, to a neighborhood (Theorem 4).

    ``L_alpha/2 ((1 - gamma mu_alpha)^k |x_avg - x*|^2 + gamma sigma/mu_alpha)`` with
    ``sigma = 2/n mean omega_i |grad f~_i(x*)|^2``, bounded as in ``bounds``.
    """
    step = steps.dcgd(known.alpha, known.smoothness, omega)
    if step == 0:
        return Bound(0.0, 0.0, 0.0, 0.0)
    sigma = 2 / known.clients * memory_noise(known, omega)
    return Bound(
        start=known.L_alpha / 2 * start_distance(known),
        factor=max(1 - step * known.mu_alpha, 0.0),
        floor=known.L_alpha / 2 * step * sigma / known.mu_alpha,
        at_start=one_shot(known),
    )


def perm_k(known: MixtureConstants) -> Bound:
    """Perm-k at ``steps.perm_k``: E f~(x^k) - min f~, to a neighborhood.

    ``L_alpha/2 ((1 - gamma mu_alpha)^k |x_avg - x*|^2 + 2 gamma sigma/mu_alpha)`` with
    ``sigma = mean |grad f~_i(x*)|^2``, bounded as in ``bounds``.
    """
    step = steps.perm_k(known.alpha, known.smoothness)
    if step == 0:
        return Bound(0.0, 0.0, 0.0, 0.0)
    return Bound(
        start=known.L_alpha / 2 * start_distance(known),
        factor=max(1 - step * known.mu_alpha, 0.0),
        floor=known.L_alpha * step * memory_noise(known, 1.0) / known.mu_alpha,
        at_start=one_shot(known),
    )


def downlink(known: MixtureConstants, delta, distance: float | None = None) -> Bound:
    """EF21-P at ``steps.downlink``: E f~(w^k) - min f~ at the clients' copy w^k.

    ``(1 + L_alpha/(2 c)) (1 - gamma mu_alpha)^k Psi^0`` with Psi of ``steps`` and
    c the weight of its error: ``f~(w) - min f~ <= (sqrt(f~(x) - min f~) +
    sqrt(L_alpha/2) |x - w|)^2``. x^0 is x_avg, of which clients have what ``C`` leaves
    of the distance to the initial parameters.

    Args:
        known: constants of f~.
        delta: how much the compressor contracts.
        distance: ``|x_avg - initial parameters|^2``; from zero if None.
    """
    step = steps.downlink(known.alpha, known.smoothness, delta)
    if step == 0:
        return Bound(0.0, 0.0, 0.0, 0.0)
    least = steps.least_contraction(delta, 1)
    if least == 1:
        return bounds.dgd(known)
    if distance is None:
        distance = float(known.average @ known.average)
    error = (1 - least) * distance
    weight = known.L_alpha**2 * feedback_weight(step, known.mu_alpha, least)
    copied = 1 + known.L_alpha / (2 * weight)
    here = (math.sqrt(one_shot(known)) + math.sqrt(known.L_alpha * error / 2)) ** 2
    start = copied * (one_shot(known) + weight * error)
    return Bound(start, 1 - step * known.mu_alpha, 0.0, here)


def dcgd_convex(known: MixtureConstants, omega, distance: float, rounds) -> np.ndarray:
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
    known: MixtureConstants, omega, distance: float, rounds, memory_rate=None
) -> np.ndarray:
    """DIANA at ``steps.diana_convex``, for the mean of the iterates (Theorem 7).

    ``(2 (f~(x^0) - f~*) + 4 gamma sigma_0^2/(n min b_i) + |x^0 - x*|^2/gamma)/k``.
    Arguments as for ``dcgd_convex`` and ``steps.diana``.
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


@gate(**steps.KNOWN, horizon=COUNT)
def dcgd_nonconvex_step(alpha, smoothness: Smoothness, omega, horizon: int) -> float:
    """The step of DCGD for ``horizon`` rounds in all (Theorem 8).

    Other arguments as for ``steps.dcgd``.
    """
    parts = smoothness_of_parts(alpha, smoothness)
    top = L_alpha(alpha, smoothness)
    noise = float((parts * steps.variances(omega, len(parts))).max()) / len(parts)
    if noise == 0:
        return steps.dgd(alpha, smoothness)
    return min(1 / top, math.sqrt(1 / (2 * top * noise * horizon)))


@gate(**steps.KNOWN)
def diana_nonconvex_step(
    alpha, smoothness: Smoothness, omega, memory_rate=None
) -> float:
    """The step of DIANA with memories that start at the gradient (Theorem 9).

    One omega, the largest, and one b for all clients; by default 1/(omega + 1).
    Arguments as for ``steps.diana``.
    """
    clients = len(smoothness.smooth)
    worst = float(steps.variances(omega, clients).max())
    if memory_rate is not None:
        low, high = memory_range(worst)
        rates = client_values("memory_rate", memory_rate, clients)
        rounding = 1e-12
        if not (low * (1 - rounding) <= rates[0] <= high * (1 + rounding)) or any(
            rates != rates[0]
        ):
            raise ValueError(
                f"memory_rate: {memory_rate} is not one number in "
                f"[{low:g}, {high:g}] for omega {worst:g}"
            )
    root = math.sqrt(float(np.mean(smoothness_of_parts(alpha, smoothness) ** 2)))
    if worst == 0 or root == 0:
        return steps.dgd(alpha, smoothness)
    e = (1 + worst) * worst * (3 + 2 * worst) / clients
    return min(1 / (2 * math.sqrt(e)), 2 / (math.sqrt(1 + 8 * e) + 1)) / root


def memory_range(omega: float) -> tuple[float, float]:
    """The smallest and the largest b of nonconvex DIANA (Theorem 9).

    ``1/(1+omega) [1, min(1 + 1/(2(1+omega)), sqrt(3/2 + omega + 1/(2 omega)))]``
    """
    low = 1 / (1 + omega)
    if omega == 0:
        return low, 1.5
    edge = math.sqrt(1.5 + omega + 0.5 / omega)
    return low, low * min(1 + low / 2, edge)


def dcgd_nonconvex(
    alpha, smoothness: Smoothness, omega, horizon: int, gap: float, rounds
) -> np.ndarray:
    """The least E |grad f~(x^t)|^2, t < k, at ``dcgd_nonconvex_step`` (Theorem 8).

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
    step = dcgd_nonconvex_step(alpha, smoothness, omega, horizon)
    parts = smoothness_of_parts(alpha, smoothness)
    noise = float((steps.variances(omega, len(parts)) * parts).max()) / len(parts)
    rounds = np.asarray(rounds, np.float64)
    growth = (1 + 2 * L_alpha(alpha, smoothness) * step**2 * noise) ** rounds
    bound = growth * _gradients(alpha, smoothness, step, gap, rounds)
    return np.where(rounds > horizon, np.inf, bound)


def diana_nonconvex(
    alpha, smoothness: Smoothness, omega, gap: float, rounds, memory_rate=None
) -> np.ndarray:
    """E |grad f~|^2 at a random x^t, t < k, at ``diana_nonconvex_step`` (Theorem 9).

    ``2 gap/(gamma k)`` with memories that start at the gradient. Arguments as for
    ``dcgd_nonconvex``.
    """
    step = diana_nonconvex_step(alpha, smoothness, omega, memory_rate)
    return _gradients(alpha, smoothness, step, gap, rounds)


def _gradients(alpha, smoothness, step, gap, rounds) -> np.ndarray:
    """``2 gap/(gamma k)``, and ``2 L_alpha gap`` before the first round."""
    if step == 0:
        return np.zeros(np.shape(rounds))
    rounds = np.asarray(rounds, np.float64)
    later = 2 * gap / (step * np.maximum(rounds, 1))
    return np.where(rounds == 0, 2 * L_alpha(alpha, smoothness) * gap, later)


class Plan(NamedTuple):
    """A plan with ``f~ - min f~ <= eps`` after ``rounds``, the first one for x_avg.

    ``alpha`` is that of all clients. ``rounds`` is None where theory has no bound.
    """

    alpha: float
    rounds: int | None
    eps: float


def rounds_needed(
    alpha: float, eps: float, smoothness: Smoothness, personal: PyTree, omega: float = 0
) -> Plan:
    """The fewest rounds after which theory guarantees the accuracy.

    Args:
        alpha: the weight of the shared model.
        eps: the accuracy.
        smoothness: of all f_i.
        personal: their minimizers.
        omega: variance of DIANA's compressors; 0 for gradient descent.
    """
    if FRACTION("alpha", alpha) == 0:
        return Plan(0.0, 0, eps)
    later = _curve(mixture(alpha, smoothness, personal), omega).rounds_to(eps)
    return Plan(float(alpha), None if later is None else later + 1, eps)


def largest_alpha(
    rounds: int, eps: float, smoothness: Smoothness, personal: PyTree, omega: float = 0
) -> Plan:
    """The largest alpha that theory guarantees to solve in that many rounds.

    All bounds are alpha^2 times that of alpha = 1. The plan's ``rounds`` are those that
    this alpha needs, which may be fewer. Other arguments as for ``rounds_needed``.
    """
    WHOLE("rounds", rounds)
    if rounds == 0:
        return Plan(0.0, 0, eps)
    curve = _curve(mixture(1.0, smoothness, personal), omega)
    least = min(curve.at_start, float(curve.value(rounds - 1)))
    alpha = min(1.0, math.sqrt(eps / least)) if least > 0 else 1.0
    return rounds_needed(alpha, eps, smoothness, personal, omega)


def _curve(known: MixtureConstants, omega: float) -> Bound:
    return bounds.diana(known, omega) if omega else bounds.dgd(known)

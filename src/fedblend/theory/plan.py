# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How much communication an alpha needs, and how large an alpha a budget allows.

Round 1 collects x_avg, every later round is one of the solver, so that k + 1 rounds
reach x^k. With ``alpha_i = alpha shape_i`` the bounds of this package are::

    f~(x_avg) - min f~ <= alpha^2 c0        f~(x^k) - min f~ <= alpha^2 c factor^k

because every step size is proportional to 1/alpha^2. They are solved for k, or for
alpha. For equal alpha and DGD that is the plan of the paper: with ``A = sqrt(2 eps/(L
V))`` and ``q = 1/sqrt(1 - mu/L)``, x_avg alone is enough for ``alpha <= A``, and k + 1
rounds for ``A q^(k-1) < alpha <= A q^k``. Bounds on DIANA are on the expected value.

Edges: alpha = 0 needs no rounds; V = 0 allows any alpha in one; mu = 0 has no bound
beyond A; mu = L needs two rounds. Where theory has no bound, ``rounds`` is None.
Reference: see ``constants``.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fedblend.checks import FRACTION, NOT_NEGATIVE, POSITIVE, WHOLE, words
from fedblend.core import PyTree
from fedblend.theory import bounds
from fedblend.theory.bounds import Curve
from fedblend.theory.constants import Smoothness, mixture

ROUNDING = 1e-9
"""A bound that misses eps by this fraction meets it: both directions then agree."""

MOST_ROUNDS = 10**12
"""A bound that needs more rounds is no plan."""


class Traffic(NamedTuple):
    """Bits of a round, over all clients, up and down.

    ``first`` is round 1 (the pure local models up, x_avg down), ``later`` every round
    of the solver, ``start`` is sent once before the solver's first round: uncompressed
    gradients, if DIANA's memories start at them.
    """

    first: float
    later: float
    start: float = 0.0


class Solver(NamedTuple):
    """The solver of the rounds, by its name in ``bounds.curve``, and its compressors.

    "dgd" and "accelerated" have none; "dcgd" and "diana" have ``omega``, "ef21" and
    "downlink" have ``delta``. "dcgd" and "perm_k" have a step and no plan: they end in
    a neighborhood.
    """

    name: str = "dgd"
    omega: float | np.ndarray | None = 0.0
    memory_rate: float | np.ndarray | None = None
    delta: float | np.ndarray | None = None


class Plan(NamedTuple):
    """A plan with ``f~ - min f~ <= bound <= eps`` after ``rounds`` and ``bits``.

    ``alpha`` is the largest alpha_i. ``rounds`` is None where theory has no bound, and
    then ``bound`` is infinite; ``bits`` is None without ``Traffic``.
    """

    alpha: float
    rounds: int | None
    bits: float | None
    bound: float
    eps: float


DGD = Solver()
"""Gradient descent, uncompressed."""


def rounds_needed(
    alpha: float,
    eps: float,
    smoothness: Smoothness,
    personal: PyTree,
    *,
    solver: Solver = DGD,
    shape=1.0,
    traffic: Traffic | None = None,
    gap: float | None = None,
) -> Plan:
    """The fewest rounds after which theory guarantees ``f~ - min f~ <= eps``.

    Args:
        alpha: the weight of the shared model; of the client with the largest.
        eps: the accuracy.
        smoothness: of all f_i.
        personal: their minimizers; check them with ``bounds.require_minimizers``.
        solver: what runs from x_avg, at its step of ``steps``.
        shape: alpha_i in units of alpha, one for every client, the largest 1.
        traffic: the bits of rounds.
        gap: ``f~(x_avg) - mean f_i(x_i)`` for this alpha, where it was measured, in
            place of L_alpha V/2.
    """
    curve = _curve(smoothness, personal, solver, shape, gap and gap / alpha**2)
    return _needed(FRACTION("alpha", alpha), POSITIVE("eps", eps), curve, traffic)


def largest_alpha(
    rounds: int,
    eps: float,
    smoothness: Smoothness,
    personal: PyTree,
    *,
    solver: Solver = DGD,
    shape=1.0,
    traffic: Traffic | None = None,
) -> Plan:
    """The largest alpha that theory guarantees to solve in that many rounds.

    The plan's ``rounds`` are those that this alpha needs, which may be fewer. Other
    arguments as for ``rounds_needed``.
    """
    WHOLE("rounds", rounds)
    curve = _curve(smoothness, personal, solver, shape)
    alpha = _allowed(rounds, POSITIVE("eps", eps), curve)
    return _needed(alpha, eps, curve, traffic)


def largest_alpha_for_bits(
    bits: float,
    eps: float,
    smoothness: Smoothness,
    personal: PyTree,
    traffic: Traffic,
    *,
    solver: Solver = DGD,
    shape=1.0,
) -> Plan:
    """The largest alpha that theory guarantees to solve with that many bits.

    Other arguments as for ``rounds_needed``, which also gives the bits of an alpha.
    """
    rounds = affordable_rounds(bits, traffic)
    return largest_alpha(
        rounds,
        eps,
        smoothness,
        personal,
        solver=solver,
        shape=shape,
        traffic=traffic,
    )


def affordable_rounds(bits: float, traffic: Traffic) -> int:
    """The number of rounds that fit into these bits."""
    NOT_NEGATIVE("bits", bits)
    if min(traffic.first, traffic.later) <= 0 or traffic.start < 0:
        raise ValueError(f"traffic: {tuple(traffic)}: rounds cost more than 0 bits")
    left = bits - traffic.first
    if left < 0:
        return 0
    return 1 + max(math.floor((left - traffic.start) / traffic.later), 0)


def spent_bits(rounds: float, traffic: Traffic) -> float:
    """The bits of this many rounds."""
    if rounds == 0:
        return 0.0
    solving = traffic.start + (rounds - 1) * traffic.later if rounds > 1 else 0.0
    return traffic.first + solving


def table(
    alphas: Iterable[float],
    eps: float,
    smoothness: Smoothness,
    personal: PyTree,
    *,
    solver: Solver = DGD,
    shape=1.0,
    traffic: Traffic | None = None,
) -> list[Plan]:
    """``rounds_needed`` for every alpha of a grid, in its order."""
    curve = _curve(smoothness, personal, solver, shape)
    POSITIVE("eps", eps)
    return [_needed(FRACTION("alpha", alpha), eps, curve, traffic) for alpha in alphas]


def rounds_of(curve: Curve, eps: float) -> int | None:
    """The rounds after which a bound is at most eps, the one of x_avg included."""
    return _rounds(1.0, POSITIVE("eps", eps), curve)


def bound_of(curve: Curve, rounds: int) -> float:
    """A bound after so many rounds, the one of x_avg included."""
    return _bound(1.0, WHOLE("rounds", rounds), curve)


def _curve(
    smoothness: Smoothness, personal, solver: Solver, shape, gap: float | None = None
) -> Curve:
    """The bound of the solver for alpha = 1 in this shape, from a gap there."""
    known = mixture(shape, smoothness, personal)
    if gap is not None:
        known = bounds.measured(known, gap)
    words("dgd", "accelerated", "diana", "ef21", "downlink")("solver", solver.name)
    if known.alpha.max() != 1:
        raise ValueError(f"shape: its largest entry is {known.alpha.max():g}, not 1")
    return bounds.curve(solver.name, known, *solver[1:])


def _needed(alpha: float, eps: float, curve: Curve, traffic: Traffic | None) -> Plan:
    alpha = float(alpha)
    rounds = _rounds(alpha, eps, curve)
    if rounds is None:
        return Plan(alpha, None, None, math.inf, eps)
    bits = None if traffic is None else spent_bits(rounds, traffic)
    return Plan(alpha, rounds, bits, _bound(alpha, rounds, curve), eps)


def _bound(alpha: float, rounds: int, curve: Curve) -> float:
    """The bound after this many rounds, the first of which collects x_avg."""
    if alpha == 0:
        return 0.0
    if rounds == 0:
        return math.inf
    if rounds == 1:
        return alpha**2 * curve.at_start
    return alpha**2 * curve.start * curve.factor ** (rounds - 1)


def _rounds(alpha: float, eps: float, curve: Curve) -> int | None:
    enough = eps * (1 + ROUNDING)
    for rounds in (0, 1, 2):
        if _bound(alpha, rounds, curve) <= enough:
            return rounds
    if curve.factor >= 1:
        return None
    steps = math.log(enough / (alpha**2 * curve.start)) / math.log(curve.factor)
    if steps > MOST_ROUNDS:
        return None
    rounds = max(math.ceil(steps) + 1, 3)
    if rounds > 3 and _bound(alpha, rounds - 1, curve) <= enough:
        return rounds - 1  # the logarithm was rounded up
    return rounds if _bound(alpha, rounds, curve) <= enough else rounds + 1


def _allowed(rounds: int, eps: float, curve: Curve) -> float:
    """``sqrt(eps/c)`` for the better of x_avg and the last iterate, at most 1."""
    if rounds == 0:
        return 0.0
    least = curve.at_start
    if rounds > 1:
        least = min(least, curve.start * curve.factor ** (rounds - 1))
    return min(1.0, math.sqrt(eps / least)) if least > 0 else 1.0

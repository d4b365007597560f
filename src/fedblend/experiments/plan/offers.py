# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a configuration, the cheapest first, with the settings that run them.

Every plan has three numbers of rounds, the one that collects x_avg included, after
which ``f~ - min f~ <= eps``:

worst case   theory's, from ``f~(x_avg) - min f~ <= L_alpha V/2``, for any data with
             these constants
certified    theory's, from the start that is measured on these rows. Both are promises;
             of a random solver they are of the expected value
typical      those of a trial, which is run until its certificate proves eps

What is promised of bits, seconds and cost is that of typical rounds where there was a
trial, else of certified ones.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from fedblend.config.config import Config
from fedblend.config.toml import literal
from fedblend.experiments.plan.candidates import (
    Candidate,
    candidates,
    config_of,
    configured,
)
from fedblend.experiments.plan.messages import Ways, ways
from fedblend.experiments.plan.prices import Prices
from fedblend.experiments.plan.problem import Problem
from fedblend.experiments.plan.trial import Trial, trial
from fedblend.theory.certificate import require_resolved
from fedblend.theory.plan import affordable_rounds, bound_of, rounds_of

GRID = tuple(tenth / 10 for tenth in range(1, 11))
"""The alphas of a table."""
DIGITS = 6
"""Digits to which an alpha is rounded down, so that a command can hold it."""
HALVINGS = 40
"""Of the interval in which the largest alpha of a budget lies."""
MOST = 100_000
"""Rounds of a trial at most."""
FAMILY = 3
"""Candidates of a family that are tried, by the cost of their certified rounds."""
SAME = Prices()
"""Both ways cost the same."""
PATIENCE = 2
"""Trials of random solvers may take so many times their certified rounds."""


class Offer(NamedTuple):
    """A plan: what a candidate needs for an alpha, and what that costs.

    ``rounds`` are those that ``up``, ``down``, ``bound`` and ``settings`` are for. They
    are None where nothing is promised.
    """

    candidate: Candidate
    alpha: float
    worst: int | None
    certified: int | None
    trial: Trial | None
    rounds: int | None
    up: float | None
    down: float | None
    bound: float
    """On ``f~ - min f~``: the certificate of the trial, or theory's of the rounds."""
    cost: float
    ways: Ways
    settings: tuple[str, ...] = ()
    """For ``fedblend run --set``; empty where there is nothing to run, or the file has
    a table ``[compress]`` too many."""

    @property
    def typical(self) -> int | None:
        """The rounds of the trial, if it arrived."""
        return self.trial.rounds if self.trial and self.trial.arrived else None


def offers(
    found: Problem,
    eps: float,
    *,
    alpha: float | None = None,
    rounds: int | None = None,
    bits: float | None = None,
    prices: Prices = SAME,
    trials: bool = True,
    among: Sequence[Candidate] | None = None,
) -> list[Offer]:
    """What each candidate needs for an alpha or allows for a budget, best first.

    For an alpha the cheapest is the best; for a budget the one with the largest alpha
    that is certified within it, and of several the cheapest. A trial that costs more
    than the best one so far is given up.

    Args:
        found: from ``problem``.
        eps: the accuracy, ``f~ - min f~``.
        alpha: find what it needs.
        rounds: find the largest alpha that so many allow, that of x_avg included.
        bits: find the largest alpha that so many allow, up and down together.
        prices: of bits.
        trials: run candidates for their typical rounds.
        among: the candidates; all if None.
    """
    if sum(value is not None for value in (alpha, rounds, bits)) != 1:
        raise ValueError("alpha, rounds, bits: give one of them")
    check_accuracy(found.config, eps)
    made = []
    for candidate in candidates(found) if among is None else among:
        cost = ways(found, config_of(found, candidate))
        own = alpha
        if own is None:
            most = rounds
            if most is None:
                most = affordable_rounds(cast(float, bits), cost.both)
            own = _largest_alpha(found, candidate, eps, most)
        made.append(_by_theory(found, candidate, own, eps, cost, prices))
    made.sort(key=lambda one: one.cost)
    if trials:
        made = _tried(found, made, eps, prices)
    by_alpha = alpha is None
    return sorted(made, key=lambda one: (-one.alpha if by_alpha else 0, one.cost))


def check_accuracy(config: Config, eps: float) -> None:
    """Refuse an accuracy below the rounding of a run of the configuration."""
    require_resolved("eps", eps, config.run.precision)


def table(found: Problem, eps: float, alphas: Iterable[float] = GRID) -> list[Offer]:
    """What gradient descent needs for each alpha, and what the file has, by theory."""
    made: list[Offer] = []
    for candidate in configured(found):
        cost = ways(found, config_of(found, candidate))
        every = (found, candidate)
        made += [_by_theory(*every, alpha, eps, cost, SAME) for alpha in alphas]
    return made


def warnings(config: Config, found: Problem, eps: float, alpha: float) -> list[str]:
    """Reasons why a run of the configuration may miss its promise.

    Plans are for exact x_i. An x_i found to a gradient norm t is within t/mu_i of the
    exact one, which moves the root of V by at most that much.
    """
    known, options = found.known, cast(Any, config.algorithm)
    tolerance = options.personal.tolerance
    convex = found.smoothness.convex
    far = tolerance / float(convex[convex > 0].min())
    moved = alpha**2 * known.L_alpha * (math.sqrt(known.V) * far + far**2 / 2)
    if moved <= eps / 10:
        return []
    better = 10 ** math.floor(math.log10(tolerance * eps / (10 * moved)))
    return [
        f"x_i found to a gradient norm of {tolerance:g} may miss the bound by up to "
        f"{moved:.2g}, more than a tenth of eps; set "
        f"algorithm.personal.tolerance={better:.0e}"
    ]


def _by_theory(
    found: Problem,
    candidate: Candidate,
    alpha: float,
    eps: float,
    cost: Ways,
    prices: Prices,
) -> Offer:
    """A plan without a trial."""
    if alpha == 0:
        return Offer(candidate, 0.0, 0, 0, None, 0, 0.0, 0.0, 0.0, 0.0, cost)
    worst = rounds_of(candidate.curve(found.at(alpha)), eps)
    curve = candidate.curve(found.measured(alpha))
    rounds = rounds_of(curve, eps)
    none = Offer(
        candidate, alpha, worst, None, None, None, None, None, math.inf, math.inf, cost
    )
    if rounds is None:
        return none
    up, down = cost.spent(rounds)
    return none._replace(
        certified=rounds,
        rounds=rounds,
        up=up,
        down=down,
        bound=bound_of(curve, rounds),
        cost=prices.cost(up, down, len(found.shape)),
        settings=_settings(found, candidate, alpha, rounds),
    )


def _tried(
    found: Problem, made: Sequence[Offer], eps: float, prices: Prices
) -> list[Offer]:
    """The plans with trials, of which those beyond the best cost are given up."""
    after: list[Offer] = []
    clients, best = len(found.shape), math.inf

    def too_much(up: int, down: int) -> bool:
        return prices.cost(up, down, clients) > best

    chosen = shortlist(made)
    for one in made:
        if one not in chosen or one.certified is None:
            after.append(one)
            continue
        own = literal(_alphas(found, one.alpha))
        config = config_of(found, one.candidate, f"algorithm.alpha={own}")
        most = min(PATIENCE * one.certified + 10, MOST)
        run = trial(found, config, eps, most, too_much)
        cost = prices.cost(run.up, run.down, clients)
        one = one._replace(trial=run, cost=max(one.cost, cost))
        if run.arrived:
            best = min(best, cost)
            settings = _settings(found, one.candidate, one.alpha, run.rounds)
            one = one._replace(
                rounds=run.rounds,
                up=run.up,
                down=run.down,
                bound=run.gap,
                cost=cost,
                settings=settings,
            )
        after.append(one)
    return after


def shortlist(made: Sequence[Offer]) -> list[Offer]:
    """Plans worth a trial: of every family of candidates those of the least cost."""
    found: list[Offer] = []
    for one in made:
        same = [other.candidate.family == one.candidate.family for other in found]
        if one.alpha and one.certified is not None and sum(same) < FAMILY:
            found.append(one)
    return found


def _alphas(found: Problem, alpha: float) -> Any:
    """A number, or a list of what it is in the shape of the configuration."""
    equal = bool((found.shape == 1).all())
    return alpha if equal else (alpha * found.shape).tolist()


def _settings(
    found: Problem, candidate: Candidate, alpha: float, rounds: int
) -> tuple[str, ...]:
    too_many = found.config.compress is not None and not candidate.compresses
    if too_many or not rounds:
        return ()
    return (
        *candidate.settings,
        f"algorithm.alpha={literal(_alphas(found, alpha))}",
        "algorithm.rate=theory",
        f"run.rounds={rounds - 1}",
    )


def _largest_alpha(
    found: Problem, candidate: Candidate, eps: float, rounds: int
) -> float:
    """The largest alpha that is certified within these rounds, rounded down."""

    def enough(alpha: float) -> bool:
        needed = rounds_of(candidate.curve(found.measured(alpha)), eps)
        return needed is not None and needed <= rounds

    if rounds == 0:
        return 0.0
    if enough(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return _rounded_down(low)


def _rounded_down(alpha: float) -> float:
    if alpha == 0:
        return alpha
    places = DIGITS - 1 - math.floor(math.log10(alpha))
    return math.floor(round(alpha * 10**places, 3)) / 10**places

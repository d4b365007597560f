# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of a configuration, the cheapest first, with the settings that run them.

Every plan has numbers of rounds, the one that collects x_avg included, after which
``f~ - min f~ <= eps``:

worst case   theory's, from ``f~(x_avg) - min f~ <= L_alpha V/2``, for any data with
             these constants
certified    theory's, from the start that is measured on these rows. Both are promises;
             of a random solver they are of the expected value
typical      of trials, which are run until their certificates prove eps: the median
             over seeds, and the rounds by which nine of ten seeds are done

Trials with some seeds choose: among 1/p of each candidate first, then among candidates,
by the mean cost. Those with other seeds count the typical rounds, so that these are not
those of lucky seeds. What costs more than twice the best is given up.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fedblend import keys
from fedblend.config.config import Config
from fedblend.config.toml import literal
from fedblend.core import Key
from fedblend.runs.plan.candidates import (
    Candidate,
    candidates,
    config_of,
    configured,
)
from fedblend.runs.plan.messages import Ways, ways
from fedblend.runs.plan.prices import Prices
from fedblend.runs.plan.problem import Problem, first_key
from fedblend.runs.plan.trial import PART, Trials
from fedblend.theory.certificate import require_resolved
from fedblend.theory.plan import affordable_rounds, bound_of, rounds_of

GRID = tuple(tenth / 10 for tenth in range(1, 11))
"""The alphas of a table."""
BILLION = 10**9
"""Alphas of a budget are multiples of its inverse, so that a command can hold them."""
MOST = 100_000
"""Rounds of a trial at most."""
SAME = Prices()
"""Both ways cost the same."""
PATIENCE = 2
"""Trials of random solvers may take so many times their certified rounds."""
SEEDS, REPORTS = 10, 4
"""Seeds of a trial. One trial chooses, and so many others count typical rounds."""
REACH, CLOSE = 2, 1.25
"""Costs in units of the best, up to which typical rounds count, and 1/p is refined.

Twice as many local steps at most halve the rounds."""
LONGER = (2, 2**0.5, 2**0.25)
"""Factors between the 1/p that are tried, coarse to fine."""


class Price(NamedTuple):
    """What rounds cost, in bits up and down, and in all."""

    rounds: int
    up: float
    down: float
    cost: float


class Offer(NamedTuple):
    """A plan: what a candidate needs for an alpha, and what that costs."""

    candidate: Candidate
    alpha: float
    ways: Ways
    worst: int | None = None
    """None where theory has no bound, and so are ``certified`` and ``bound``."""
    certified: Price | None = None
    bound: float | None = None
    """On ``f~ - min f~`` after the certified rounds."""
    tried: float = math.inf
    """The mean cost in trials that choose."""
    beyond: int | None = None
    """Rounds that were not enough on average, of a trial that was given up."""
    median: Price | None = None
    """Of the trials that count typical rounds, and None without them."""
    p90: int | None = None
    settings: tuple[str, ...] = ()
    """For ``fedblend run --set``; empty where there is nothing to run, or the file has
    a table ``[compress]`` too many."""

    @property
    def order(self) -> tuple[float, float]:
        """The cheapest first, by trials if there are any."""
        return self.tried, math.inf if self.certified is None else self.certified.cost


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
    that is certified within it, and of several the cheapest.

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
    require_resolved("eps", eps, found.config.run.precision)
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
    made.sort(key=lambda one: one.order)
    by_alpha = alpha is None
    if trials:
        # With another 1/p, an alpha is not certified within the budget.
        made = _with_trials(found, made, eps, prices, climbs=not by_alpha)
    return sorted(made, key=lambda one: (-one.alpha if by_alpha else 0, one.order))


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
    plain = Offer(candidate, alpha, cost)
    if alpha == 0:
        free = Price(0, 0.0, 0.0, 0.0)
        return plain._replace(worst=0, certified=free, bound=0.0)
    worst = rounds_of(candidate.curve(found.at(alpha)), eps)
    curve = candidate.curve(found.measured(alpha))
    rounds = rounds_of(curve, eps)
    if rounds is None:
        return plain._replace(worst=worst)
    return plain._replace(
        worst=worst,
        certified=_price(prices, cost, rounds),
        bound=bound_of(curve, rounds),
        settings=_settings(found, candidate, alpha, eps, rounds),
    )


def _with_trials(
    found: Problem, made: Sequence[Offer], eps: float, prices: Prices, climbs: bool
) -> list[Offer]:
    """The plans with their trials, and with the best 1/p where that ``climbs``."""
    root = keys.named(first_key(found.built), "plan")
    choosing, *reporting = jax.random.split(root, (1 + REPORTS, SEEDS))
    chosen: list[tuple[Offer, Trials | None]] = []
    best = math.inf
    for one in made:
        if not one.alpha or one.certified is None:
            chosen.append((one, None))
            continue
        own = literal(_alphas(found, one.alpha))
        config = config_of(found, one.candidate, f"algorithm.alpha={own}")
        trials = Trials(found, config, eps)
        price = partial(_price, prices, one.ways)
        seeds = choosing[: SEEDS if one.candidate.random else 1]
        most = min(PATIENCE * one.certified.rounds + 10, MOST)
        most, close = (min(most, _within(price, of * best)) for of in (REACH, CLOSE))

        def mean_rounds(steps: int | None, most: float) -> float:
            return float(trials.run(seeds, steps, most).mean())  # noqa: B023

        steps = one.candidate.steps
        if steps is None or not climbs:
            rounds = mean_rounds(steps, most)
        else:
            steps, rounds = climb(mean_rounds, 2 * steps, most, close)
            candidate = one.candidate._replace(steps=steps)
            one = _by_theory(found, candidate, one.alpha, eps, one.ways, prices)
        cost, beyond = math.inf, math.floor(most)
        if rounds < math.inf:
            cost, beyond = price(rounds).cost, math.ceil(rounds) - 1
        best = min(best, cost)
        chosen.append((one._replace(tried=cost, beyond=beyond), trials))
    return [
        one
        if trials is None or one.tried > REACH * best
        else _with_typical(found, one, eps, prices, trials, reporting)
        for one, trials in chosen
    ]


def climb(
    mean_rounds: Callable[[int, float], float], start: int, most: float, close: float
) -> tuple[int, float]:
    """The 1/p with the fewest rounds near ``start``, and these.

    Args:
        mean_rounds: from 1/p and the rounds after which it is given up to the rounds.
        start: the first 1/p.
        most: rounds that are out of reach.
        close: rounds beyond which a finer search is of no use.
    """
    known, here = {start: mean_rounds(start, most)}, start
    for factor, within in zip(LONGER, (most, close, close), strict=True):
        while known[here] <= within:
            for steps in (round(here * factor), max(round(here / factor), 1)):
                if steps not in known:
                    known[steps] = mean_rounds(steps, known[here])
                if known[steps] < known[here]:
                    here = steps
                    break
            else:
                break
    return here, known[here]


def _within(price: Callable[[float], Price], cost: float) -> float:
    """The rounds of a cost, of which it is a linear function from the second on."""
    first, second = price(2).cost, price(3).cost
    return 2 + (cost - first) / (second - first)


def _with_typical(
    found: Problem,
    one: Offer,
    eps: float,
    prices: Prices,
    trials: Trials,
    seeds: Sequence[Key],
) -> Offer:
    """The plan with the rounds of seeds that did not choose it."""
    candidate, rounds = one.candidate, np.array([cast(int, one.beyond) + 1])
    if candidate.random:
        several = [trials.run(some, candidate.steps, MOST) for some in seeds]
        rounds = np.concatenate(several)
    # Of n seeds, k/(n + 1) of all others are done by the rounds of the k-th.
    points = np.quantile(rounds, (0.5, 0.9), method="weibull")
    median, p90 = np.ceil(points).astype(int).tolist()
    settings = _settings(found, candidate, one.alpha, eps, p90)
    price = _price(prices, one.ways, median)
    return one._replace(median=price, p90=p90, beyond=None, settings=settings)


def _price(prices: Prices, cost: Ways, rounds: float) -> Price:
    up, down = cost.spent(rounds)
    return Price(cast(int, rounds), up, down, prices.cost(up, down, cost.clients))


def _alphas(found: Problem, alpha: float) -> Any:
    """A number, or a list of what it is in the shape of the configuration."""
    equal = bool((found.shape == 1).all())
    return alpha if equal else (alpha * found.shape).tolist()


def _settings(
    found: Problem, candidate: Candidate, alpha: float, eps: float, rounds: int
) -> tuple[str, ...]:
    too_many = found.config.compress is not None and not candidate.compresses
    if too_many or not rounds:
        return ()
    return (
        *candidate.settings,
        f"algorithm.alpha={literal(_alphas(found, alpha))}",
        "algorithm.rate=theory",
        f"run.rounds={rounds - 1}",
        f"run.every={max(rounds // PART, 1)}",
        f"run.until={eps!r}",
    )


def _largest_alpha(
    found: Problem, candidate: Candidate, eps: float, rounds: int
) -> float:
    """The largest alpha that is certified within these rounds, to nine decimals."""

    def too_large(billionths: int) -> bool:
        curve = candidate.curve(found.measured(billionths / BILLION))
        needed = rounds_of(curve, eps)
        return needed is None or needed > rounds

    return bisect_left(range(1, BILLION + 1), True, key=too_large) / BILLION

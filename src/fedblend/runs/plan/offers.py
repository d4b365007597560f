# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.plan``: plans of a configuration, with the settings that run them.

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
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.checks import FRACTION, NOT_NEGATIVE, POSITIVE, WHOLE
from fedblend.config.build import Method
from fedblend.config.config import Config, load
from fedblend.config.theory_rates import rates
from fedblend.config.toml import literal
from fedblend.core import Algorithm, Key
from fedblend.errors import SettingError
from fedblend.runs.plan.candidates import (
    SAME,
    Price,
    Prices,
    SolverOptions,
    Ways,
    candidates,
    check_prices,
    config_of,
    file_solvers,
    method_for,
    run_of,
    ways,
)
from fedblend.runs.plan.problem import Problem, first_key, problem
from fedblend.simulation.certify import certificates
from fedblend.simulation.run import Run
from fedblend.theory.bounds import require_resolved
from fedblend.theory.constants import mu_alpha
from fedblend.trees import precision

GRID = tuple(tenth / 10 for tenth in range(1, 11))
"""The alphas of a table."""
BILLION = 10**9
"""Alphas of a budget are multiples of its inverse, so that a command can hold them."""
MOST = 100_000
"""Rounds of a trial at most."""
PART = 20
"""Certificates of a trial are apart by the rounds so far divided by this."""
BLOCK = 256
"""Rounds between two certificates at most."""
MARGIN = 0.95
"""The part of eps at which a trial ends: x_i of a run are found less exactly."""
PATIENCE = 2
"""Trials of random solvers may take so many times their certified rounds."""
SEEDS, REPORTS = 10, 4
"""Seeds of a trial. One trial chooses, and so many others count typical rounds."""
REACH, CLOSE = 2, 1.25
"""Costs in units of the best, up to which typical rounds count, and 1/p is refined.

Twice as many local steps at most halve the rounds."""
LONGER = (2, 2**0.5, 2**0.25)
"""Factors between the 1/p that are tried, coarse to fine."""


class Offer(NamedTuple):
    """A plan: what a candidate needs for an alpha, and what that costs."""

    candidate: SolverOptions
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
    among: Sequence[SolverOptions] | None = None,
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
    made = []
    for candidate in candidates(found) if among is None else among:
        cost = ways(found, config_of(found, candidate), prices)
        own = alpha
        if own is None:
            most = rounds
            if most is None:
                most = cost.both.affordable_rounds(cast(float, bits))
            own = _largest_alpha(found, candidate, eps, most)
        made.append(_theory_offer(found, candidate, own, eps, cost))
    made.sort(key=lambda one: one.order)
    by_alpha = alpha is None
    if trials:
        # With another 1/p, an alpha is not certified within the budget.
        made = _try_offers(found, made, eps, climbs=not by_alpha)
    return sorted(made, key=lambda one: (-one.alpha if by_alpha else 0, one.order))


def table(found: Problem, eps: float) -> list[Offer]:
    """What gradient descent needs for each alpha, and what the file has, by theory."""
    made: list[Offer] = []
    for candidate in file_solvers(found):
        cost = ways(found, config_of(found, candidate))
        made += [_theory_offer(found, candidate, alpha, eps, cost) for alpha in GRID]
    return made


def warnings(config: Config, found: Problem, eps: float, alpha: float) -> list[str]:
    """Reasons why a run of the configuration may miss its promise.

    Plans are for exact x_i. An x_i found to a gradient norm t is within t/mu_i of the
    exact one, which moves the root of V by at most that much.
    """
    known, options = found.constants(1.0), cast(Any, config.algorithm)
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


def _theory_offer(
    found: Problem,
    candidate: SolverOptions,
    alpha: float,
    eps: float,
    cost: Ways,
) -> Offer:
    """A plan without a trial."""
    plain = Offer(candidate, alpha, cost)
    if alpha == 0:
        return plain._replace(worst=0, certified=cost.price(0), bound=0.0)
    worst = candidate.curve(found.constants(alpha)).rounds_to(eps)
    plain = plain._replace(worst=None if worst is None else worst + 1)
    curve = candidate.curve(found.start_constants(alpha))
    later = curve.rounds_to(eps)
    if later is None:
        return plain
    return plain._replace(
        certified=cost.price(later + 1),
        bound=float(curve.value(later)),
        settings=_settings(found, candidate, alpha, eps, later + 1),
    )


def _try_offers(
    found: Problem, made: Sequence[Offer], eps: float, climbs: bool
) -> list[Offer]:
    """The plans with their trials, and with the best 1/p where that ``climbs``."""
    root = keys.named(first_key(found.built), "plan")
    choosing, *reporting = jax.random.split(root, (1 + REPORTS, SEEDS))
    chosen: list[tuple[Offer, Trial | None]] = []
    best = math.inf
    for one in made:
        if not one.alpha or one.certified is None:
            chosen.append((one, None))
            continue
        own = literal(_alphas(found, one.alpha))
        config = config_of(found, one.candidate, f"algorithm.alpha={own}")
        run = trial(found, config, eps)
        seeds = choosing[: SEEDS if one.candidate.random else 1]
        most = min(PATIENCE * one.certified.rounds + 10, MOST)
        most, close = (
            min(most, one.ways.rounds_within(of * best)) for of in (REACH, CLOSE)
        )

        def mean_rounds(steps: int | None, most: float) -> float:
            return float(run(seeds, steps, most).mean())  # noqa: B023

        steps = one.candidate.steps
        if steps is None or not climbs:
            rounds = mean_rounds(steps, most)
        else:
            steps, rounds = climb(mean_rounds, 2 * steps, most, close)
            candidate = one.candidate._replace(steps=steps)
            one = _theory_offer(found, candidate, one.alpha, eps, one.ways)
        cost, beyond = math.inf, math.floor(most)
        if rounds < math.inf:
            cost, beyond = one.ways.price(rounds).cost, math.ceil(rounds) - 1
        best = min(best, cost)
        chosen.append((one._replace(tried=cost, beyond=beyond), run))
    return [
        one
        if run is None or one.tried > REACH * best
        else _count_typical(found, one, eps, run, reporting)
        for one, run in chosen
    ]


Trial = Callable[[Key, int | None, float], np.ndarray]
"""``trial(keys, steps, most)``: the rounds of each seed, that of x_avg included.

``keys`` are as many in every call; ``steps`` is 1/p, None for a solver without a coin.
At more than ``most`` mean rounds a trial is given up: seeds that have not arrived then
have infinitely many.
"""


def trial(found: Problem, config: Config, eps: float) -> Trial:
    """Runs of a configuration with any 1/p until they are certified.

    They have the x_i of the plan and the precision of the configuration, and seeds are
    side by side. All runs share their compiled programs.

    Args:
        found: the problem.
        config: a candidate's, with alpha.
        eps: the accuracy.
    """
    options: Any = config.algorithm
    width = config.run.precision
    mu = mu_alpha(options.alpha, found.smoothness)
    known_rates = rates(config, found.smoothness, found.dim)
    first: list[Run] = []

    def method(steps: Any) -> Method:
        update = {} if steps is None else {"steps": steps}
        own = config.model_copy(update={"algorithm": options.model_copy(update=update)})
        return method_for(found, own, known_rates)

    def algorithm(steps: Any) -> Algorithm:
        return method(steps).algorithm

    with precision(width):
        loss = method(None).loss

    def begin(keys: Key, steps: int | None) -> Run:
        """A run at x_avg. 1/p is an argument of its programs."""
        over = None if steps is None else jnp.full(len(keys), steps)
        made = algorithm(None) if over is None else algorithm
        several: Any = {"rounds": BLOCK, "every": BLOCK, "over": over}
        run = run_of(found, config, made, key=keys, **several)
        if first:
            run.share_programs(first[0])
        else:
            first.append(run)
        next(iter(run))
        run.rounds = 0
        return run

    def arrive(keys: Key, steps: int | None, most: float) -> np.ndarray:
        with precision(width):
            run = begin(keys, steps)
            rounds = np.full(len(keys), np.inf)
            while True:
                gaps = np.array([one.gap for one in certificates(run, loss, mu)])
                arrived = gaps <= MARGIN * eps
                rounds[arrived] = np.minimum(rounds[arrived], run.round + 1)
                least = np.minimum(rounds, run.round + 2).mean()
                if np.isfinite(rounds).all() or least > most:
                    return rounds
                run.rounds += min(max(run.round // PART, 1), BLOCK)
                run.complete()

    return arrive


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


def _count_typical(
    found: Problem,
    one: Offer,
    eps: float,
    run: Trial,
    seeds: Sequence[Key],
) -> Offer:
    """The plan with the rounds of seeds that did not choose it."""
    candidate, rounds = one.candidate, np.array([cast(int, one.beyond) + 1])
    if candidate.random:
        several = [run(some, candidate.steps, MOST) for some in seeds]
        rounds = np.concatenate(several)
    # Of n seeds, k/(n + 1) of all others are done by the rounds of the k-th.
    points = np.quantile(rounds, (0.5, 0.9), method="weibull")
    median, p90 = np.ceil(points).astype(int).tolist()
    settings = _settings(found, candidate, one.alpha, eps, p90)
    typical = {"median": one.ways.price(median), "p90": p90}
    return one._replace(**typical, beyond=None, settings=settings)


def _alphas(found: Problem, alpha: float) -> Any:
    """A number, or a list of what it is in the shape of the configuration."""
    equal = bool((found.shape == 1).all())
    return alpha if equal else (alpha * found.shape).tolist()


def _settings(
    found: Problem, candidate: SolverOptions, alpha: float, eps: float, rounds: int
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
    found: Problem, candidate: SolverOptions, eps: float, rounds: int
) -> float:
    """The largest alpha that is certified within these rounds, to nine decimals."""

    def too_large(billionths: int) -> bool:
        curve = candidate.curve(found.start_constants(billionths / BILLION))
        later = curve.rounds_to(eps)
        return later is None or later + 1 > rounds

    return bisect_left(range(1, BILLION + 1), True, key=too_large) / BILLION


class PlanResult(NamedTuple):
    """Plans of a configuration, the best first.

    A row is a plain dict. Its rounds are ``worst_rounds`` and ``certified_rounds`` of
    theory, ``median_rounds`` and ``p90_rounds`` of trials; bits (``_up``, ``_down``)
    and ``_cost`` are those of the certified and of the median rounds. ``more_than`` are
    rounds at which a trial was given up. ``settings`` run the plan: see ``load``.
    """

    eps: float
    clients: int
    parameters: int
    prices: Prices
    constants: dict[str, Any]
    """L, mu and V of f~ for alpha = 1, and how exactly they are known."""
    rows: list[dict[str, Any]]
    warnings: list[str]
    """Reasons why a run may miss its plan."""
    compares: bool
    """Whether rows are solvers, and not a table over alpha."""

    @property
    def best(self) -> dict[str, Any] | None:
        """The first row; None of a table over alpha."""
        return self.rows[0] if self.compares else None

    def plain(self) -> dict[str, Any]:
        """All of it as dicts, lists, numbers and texts."""
        return {**self._asdict(), "prices": self.prices._asdict()}


def plan(
    config: Config | str | Path,
    *,
    alpha: float | None = None,
    rounds: int | None = None,
    bits: float | None = None,
    eps: float = 1e-3,
    up: float | None = None,
    down: float | None = None,
    trials: bool = True,
    sets: Iterable[str] = (),
) -> PlanResult:
    """Plan the communication of FLIX: solver, rounds, bits and alpha, before a run.

    With ``alpha``, ``rounds`` or ``bits`` it compares solvers, the best first; without,
    it is a table over alpha for gradient descent. ``docs/plan.md`` has all of it.

    Args:
        config: of FLIX with a linear model, or its TOML file.
        alpha: find the rounds and bits that it needs.
        rounds: find the largest alpha that they allow.
        bits: find the largest alpha that they allow.
        eps: the accuracy, f~ - min f~ at the end.
        up: price of a bit up; 1 if both are None.
        down: price of a bit down.
        trials: run every solver until it has arrived, to count its rounds.
        sets: settings ``key=value`` for the file.

    Raises:
        InputError: one line: an argument is wrong, or the configuration has no plan.
    """
    given = {"alpha": alpha, "rounds": rounds, "bits": bits}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SettingError(" and ".join(names), "give only one of them")
    rules = {"alpha": FRACTION, "rounds": WHOLE, "bits": NOT_NEGATIVE}
    asked: Any = {name: rules[name](name, given[name]) for name in names}
    POSITIVE("eps", eps)
    if not names and (up, down) != (None, None):
        needed = "choose among solvers; give alpha, rounds or bits too"
        raise SettingError("up, down", needed)
    prices = check_prices(up, down)
    if not isinstance(config, Config):
        config = load(Path(config), sets)
    require_resolved("eps", eps, config.run.precision)
    found = problem(config)
    made = (
        offers(found, eps, **asked, prices=prices, trials=trials)
        if asked
        else table(found, eps)
    )
    known, largest = found.constants(1.0), max(one.alpha for one in made)
    return PlanResult(
        eps=eps,
        clients=known.clients,
        parameters=found.dim,
        prices=prices,
        constants={
            "L": known.L_alpha,
            "mu": known.mu_alpha,
            "V": known.V,
            "exact": found.smoothness.exact,
            "worst_gradient_norm": found.gradient_norm,
        },
        rows=list(map(_row, made)),
        warnings=warnings(config, found, eps, largest),
        compares=bool(names),
    )


def _row(one: Offer) -> dict[str, Any]:
    none: tuple[Any, ...] = (None,) * len(Price._fields)
    prices = {
        f"{name}_{field}": value
        for name, price in (("certified", one.certified), ("median", one.median))
        for field, value in zip(Price._fields, price or none, strict=True)
    }
    return {
        "solver": one.candidate.solver,
        "options": one.candidate.options,
        "name": one.candidate.name,
        "random": one.candidate.random,
        "alpha": one.alpha,
        "worst_rounds": one.worst,
        **prices,
        "p90_rounds": one.p90,
        "more_than": one.beyond,
        "bits_at_most": one.ways.at_most,
        "bound": one.bound,
        "settings": list(one.settings),
    }

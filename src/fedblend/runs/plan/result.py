# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.plan``: the plans of a configuration, as plain values."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.checks import FRACTION, POSITIVE, WHOLE
from fedblend.config.config import Config, load
from fedblend.errors import SettingError
from fedblend.runs.plan import offers
from fedblend.runs.plan.offers import Offer, Price
from fedblend.runs.plan.prices import Prices, parse_bits, parse_prices
from fedblend.runs.plan.problem import problem
from fedblend.theory.certificate import require_resolved


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
    bits: float | str | None = None,
    eps: float = 1e-3,
    up: float | str | None = None,
    down: float | str | None = None,
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
        bits: find the largest alpha that they allow: 1e6, "2.5Mbit", "3MB".
        eps: the accuracy, f~ - min f~ at the end.
        up: price of a bit up, as a number or a speed: 1, "10Mbit/s"; 1 if None.
        down: price of a bit down, likewise.
        trials: run every solver until it has arrived, to count its rounds.
        sets: settings ``key=value`` for the file.

    Raises:
        InputError: one line: an argument is wrong, or the configuration has no plan.
    """
    given = {"alpha": alpha, "rounds": rounds, "bits": bits}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise SettingError(" and ".join(names), "give only one of them")
    rules = {"alpha": FRACTION, "rounds": WHOLE, "bits": lambda _, of: parse_bits(of)}
    asked: Any = {name: rules[name](name, given[name]) for name in names}
    POSITIVE("eps", eps)
    if not names and (up, down) != (None, None):
        needed = "choose among solvers; give alpha, rounds or bits too"
        raise SettingError("up, down", needed)
    prices = parse_prices(up, down)
    if not isinstance(config, Config):
        config = load(Path(config), sets)
    require_resolved("eps", eps, config.run.precision)
    found = problem(config)
    made = (
        offers.offers(found, eps, **asked, prices=prices, trials=trials)
        if asked
        else offers.table(found, eps)
    )
    known, largest = found.known, max(one.alpha for one in made)
    return PlanResult(
        eps=eps,
        clients=known.clients,
        parameters=found.personal.shape[1],
        prices=prices,
        constants={
            "L": known.L_alpha,
            "mu": known.mu_alpha,
            "V": known.V,
            "exact": found.smoothness.exact,
            "worst_gradient_norm": found.gradient_norm,
        },
        rows=list(map(_row, made)),
        warnings=offers.warnings(config, found, eps, largest),
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

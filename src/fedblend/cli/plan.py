# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend plan``: solver, rounds, bits and alpha, before anything is run."""

import math
import re
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Format, OutputFormat, Settings, option

if TYPE_CHECKING:
    from fedblend.experiments.plan.offers import Offer
    from fedblend.experiments.plan.prices import Prices
    from fedblend.experiments.plan.problem import Problem

RANDOM = ("diana", "ef21", "scafflix", "locodl", "compressed_scaffnew")
THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def plan(
    file: ConfigFile,
    rounds: Annotated[
        int | None, option("Find the largest alpha that R rounds allow.", "R")
    ] = None,
    bits: Annotated[
        str | None,
        option("Find the largest alpha that B bits allow: 1e6, 2.5Mbit, 3MB.", "B"),
    ] = None,
    alpha: Annotated[
        float | None, option("Find the rounds and bits that alpha = A needs.", "A")
    ] = None,
    eps: Annotated[float, option("The accuracy: f~ - min f~ at the end.", "E")] = 1e-3,
    up: Annotated[
        str | None,
        option("What a bit up costs, as a number or a speed: 1, 10Mbit/s.", "PRICE"),
    ] = None,
    down: Annotated[
        str | None,
        option("What a bit down costs, likewise: 0.1, 100Mbit/s.", "PRICE"),
    ] = None,
    trials: Annotated[
        bool,
        typer.Option(
            "--trials/--no-trials",
            help="Run every solver until it has arrived, to count its rounds.",
        ),
    ] = True,
    sets: Settings = None,
    format: OutputFormat = Format.table,
) -> None:
    """Plan the communication of FLIX: solver, rounds, bits and alpha, before a run.

    For algorithm.name = "flix" with a linear model. With --alpha, --rounds or
    --bits it compares solvers, the cheapest first, and prints the command that
    runs it; otherwise a table over alpha for gradient descent. Rounds are those
    of the worst case, those certified for these rows, and typical ones, of a trial
    run until its certificate proves the accuracy.

    [bold]Examples[/bold]

    fedblend plan flix.toml

    fedblend plan flix.toml --alpha 0.3 --eps 1e-4 --up 1 --down 0.1

    fedblend plan flix.toml --alpha 0.3 --up 10Mbit/s --down 100Mbit/s

    fedblend plan flix.toml --rounds 50 --no-trials

    fedblend plan flix.toml --bits 20Mbit --format json
    """
    given = {"--rounds": rounds, "--bits": bits, "--alpha": alpha}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise typer.BadParameter(f"{' and '.join(names)}: give only one of them")
    if not 0 < eps < math.inf:
        raise typer.BadParameter(f"--eps: {eps:g} is not a number above 0")
    if rounds is not None and rounds < 0:
        raise typer.BadParameter(f"--rounds: {rounds} is less than 0")
    if alpha is not None and not 0 <= alpha <= 1:
        raise typer.BadParameter(f"--alpha: {alpha:g} is not in [0, 1]")
    budget = None if bits is None else parsed_bits(bits)
    if not names and (up, down) != (None, None):
        raise typer.BadParameter(
            "--up, --down: choose among solvers; give --alpha, --rounds or --bits too"
        )
    prices = _prices(up, down)
    config = screen.load(file, sets)
    from fedblend.experiments.plan import offers
    from fedblend.experiments.plan.problem import problem

    with screen.errors_of(file):
        offers.check_accuracy(config, eps)
        found = problem(config)
        asked: Any = {"alpha": alpha, "rounds": rounds, "bits": budget}
        if names:
            options: Any = {"prices": prices, "trials": trials}
            made = offers.offers(found, eps, **asked, **options)
        else:
            made = offers.table(found, eps)
    for warning in offers.warnings(config, found, eps, max(x.alpha for x in made)):
        screen.warn(warning)
    again = screen.run_again(file, sets)
    if format is Format.json:
        from fedblend.experiments.run_folder import as_json

        typer.echo(as_json(_document(found, made, eps, prices, again)))
    else:
        _print(found, made, eps, prices, again if names else None)


def parsed_bits(text: str) -> float:
    """A number of bits, with or without a unit: 1e6, 2.5Mbit, 3 MB."""
    number = r"([0-9.]+(?:e[+-]?[0-9]+)?)"
    match = re.fullmatch(rf"\s*{number}\s*(?:([kMGT]?)(bit|B))?\s*", text)
    try:
        assert match is not None
        bits = (
            float(match[1]) * THOUSANDS[match[2] or ""] * (8 if match[3] == "B" else 1)
        )
    except (AssertionError, ValueError):
        units = [f"{prefix}{unit}" for prefix in THOUSANDS for unit in ("bit", "B")]
        raise typer.BadParameter(
            f"--bits: {text!r} is not a number of bits; write a number from 0 on, "
            f"with or without one of {', '.join(units)}"
        ) from None
    if not math.isfinite(bits):
        raise typer.BadParameter(f"--bits: {text} is not finite")
    return bits


def _prices(up: str | None, down: str | None) -> "Prices":
    from fedblend.errors import SettingError
    from fedblend.experiments.plan.prices import parsed_prices

    try:
        return parsed_prices(up, down)
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None


def _command(offer: "Offer", again: list[str]) -> str | None:
    if not offer.settings:
        return None
    words = [word for setting in offer.settings for word in ("--set", setting)]
    return shlex.join([*again, *words])


def _document(
    found: "Problem",
    made: list["Offer"],
    eps: float,
    prices: "Prices",
    again: list[str],
) -> dict[str, Any]:
    known = found.known
    return {
        "eps": eps,
        "clients": known.clients,
        "prices": prices._asdict(),
        "constants": {
            "L": known.L_alpha,
            "mu": known.mu_alpha,
            "V": known.V,
            "exact": found.smoothness.exact,
            "worst_gradient_norm": found.gradient_norm,
        },
        "plans": [
            {
                "solver": one.candidate.solver,
                "options": one.candidate.options,
                "alpha": one.alpha,
                "worst": one.worst,
                "certified": one.certified,
                "typical": one.typical,
                "rounds": one.rounds,
                "bits_up": one.up,
                "bits_down": one.down,
                "bits_at_most": one.ways.at_most,
                "bound": one.bound,
                "cost": one.cost,
                "command": _command(one, again),
            }
            for one in made
        ],
    }


def _print(
    found: "Problem",
    made: list["Offer"],
    eps: float,
    prices: "Prices",
    again: list[str] | None,
) -> None:
    """Print plans; ``again`` is the command to run the file, None of a table."""
    from fedblend.report.terminal import human_bits

    known, best = found.known, made[0].cost
    cost = "seconds" if prices.seconds else "cost"
    alphas = {one.alpha for one in made}
    heads = ("worst", "certified", "typical", "up", "down", cost)
    several = ("alpha",) if len(alphas) > 1 else ()
    table = screen.table("solver", *several, *heads, right=1)
    for number, one in enumerate(made):
        if again is None and number and one.candidate is not made[number - 1].candidate:
            table.add_section()
        counts = [_rounds(of) for of in (one.worst, one.certified)]
        more = "" if one.trial is None or one.typical else f"> {one.trial.rounds - 1}"
        sent = ["-", "-"]
        if one.up is not None and one.down is not None:
            sent = [human_bits(one.up), human_bits(one.down)]
        paid = f"{one.cost:.3g}" if prices.seconds else f"{_ratio(one.cost, best):.3g}"
        own = (f"{one.alpha:.6g}",) if several else ()
        typical = more or _rounds(one.typical)
        table.add_row(one.candidate.name, *own, *counts, typical, *sent, paid)
    console = screen.console()
    console.print(
        f"{known.clients} clients, {found.personal.shape[1]} parameters: L = "
        f"{known.L_alpha:.4g}, mu = {known.mu_alpha:.4g}, V = {known.V:.4g}\n"
        f"accuracy: f~ - min f~ <= {eps:g}"
        + ("" if several else f"; alpha = {made[0].alpha:.6g}")
    )
    console.print(table)
    console.print("\n".join(_notes(made, prices, again)), markup=False)
    runnable = [] if again is None else [one for one in made if one.settings]
    if again is not None and runnable and made[0].alpha:
        which = "the first" if runnable[0] is made[0] else runnable[0].candidate.name
        screen.say(f"to run {which}: {_command(runnable[0], again)}")


def _rounds(number: int | None) -> str:
    return "-" if number is None else f"{number}"


def _ratio(cost: float, best: float) -> float:
    return cost / best if best else 1.0


def _notes(made: list["Offer"], prices: "Prices", again: list[str] | None) -> list[str]:
    notes = [
        "Round 1 collects x_avg, so run.rounds is one less. Bits are those of all "
        "clients."
    ]
    if any(one.trial is not None for one in made):
        notes.append(
            "Bits and cost are those of typical rounds. > marks a trial that was given "
            "up because it cost more than the best; its bits are of certified rounds."
        )
    else:
        notes.append("Bits and cost are those of certified rounds.")
    if again is not None and not prices.seconds:
        notes.append(f"Cost: up {prices.up:g}, down {prices.down:g}; the best is 1.")
    if any(one.candidate.solver in RANDOM for one in made):
        most = any(one.ways.at_most for one in made)
        longest = ", and bits count every client like the longest message"
        notes.append(
            "Rounds by theory of a random solver are of the expected value"
            f"{longest if most else ''}."
        )
    if again is None:
        notes.append("--alpha, --rounds or --bits compares solvers.")
    elif made[0].alpha == 0:
        notes.append("alpha = 0 leaves every client its own model: nothing to run.")
    elif not made[0].settings:
        notes.append("To run the first, leave the table [compress] out.")
    return notes

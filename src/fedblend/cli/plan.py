# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend plan``: rounds, bits and alpha by theory, before anything is run."""

import math
import re
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Format, OutputFormat, Settings, option

if TYPE_CHECKING:
    from fedblend.experiments.plan import Problem, Promise

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
    sets: Settings = None,
    format: OutputFormat = Format.table,
) -> None:
    """Plan the communication of FLIX: rounds, bits and alpha, before anything is run.

    For algorithm.name = "flix" with a linear model. Without --rounds, --bits
    or --alpha it prints a table over alpha. Plans are for gradient descent (DGD)
    and, with compress.how = "diana", for DIANA with its compressor. A run of the
    plan keeps its bound; the plan comes with the command that runs it.

    [bold]Examples[/bold]

    fedblend plan flix.toml

    fedblend plan flix.toml --alpha 0.3 --eps 1e-4

    fedblend plan flix.toml --rounds 50

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
    config = screen.load(file, sets)
    from fedblend.experiments.plan import problem, promises, warnings

    with screen.errors_of(file):
        found = problem(config)
    made = promises(found, eps, alpha=alpha, rounds=rounds, bits=budget)
    for warning in warnings(config, found, made):
        screen.warn(warning)
    again = screen.run_again(file, sets)
    if format is Format.json:
        from fedblend.experiments.run_folder import as_json

        typer.echo(as_json(_document(found, made, eps, again)))
    else:
        _print(found, made, eps, again)


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


def _command(promise: "Promise", again: list[str]) -> str | None:
    if not promise.settings:
        return None
    words = [word for setting in promise.settings for word in ("--set", setting)]
    return shlex.join([*again, *words])


def _document(
    found: "Problem", made: list["Promise"], eps: float, again: list[str]
) -> dict[str, Any]:
    known = found.known
    return {
        "eps": eps,
        "clients": known.clients,
        "constants": {
            "L": known.L_alpha,
            "mu": known.mu_alpha,
            "V": known.V,
            "exact": found.smoothness.exact,
            "worst_gradient_norm": found.gradient_norm,
        },
        "plans": [
            {
                "solver": promise.scheme.solver.name,
                "alpha": promise.plan.alpha,
                "rounds": promise.plan.rounds,
                "bits": promise.plan.bits,
                "bits_at_most": promise.scheme.at_most,
                "bound": promise.plan.bound,
                "rate": promise.rate,
                "command": _command(promise, again),
            }
            for promise in made
        ],
    }


def _print(
    found: "Problem", made: list["Promise"], eps: float, again: list[str]
) -> None:
    from fedblend.report.terminal import human_bits

    known, one_each = found.known, len(made) == len(found.schemes)
    heads = ("solver", "alpha", "rounds", "bits", "bound", "algorithm.rate")
    table = screen.table(*heads, right=1)
    for number, (scheme, plan, rate, _) in enumerate(made):
        if number and scheme is not made[number - 1].scheme:
            table.add_section()
        cells = ["-", "-", "no promise"]
        if plan.rounds is not None:
            bits = human_bits(plan.bits or 0)
            cells = [f"{plan.rounds}", bits, f"{plan.bound:.3g}"]
        solver = scheme.solver.name.upper()
        table.add_row(solver, f"{plan.alpha:.6g}", *cells, f"{rate:.6g}")
    console = screen.console()
    console.print(
        f"{known.clients} clients, {found.personal.shape[1]} parameters: L = "
        f"{known.L_alpha:.4g}, mu = {known.mu_alpha:.4g}, V = {known.V:.4g}\n"
        f"accuracy: f~ - min f~ <= {eps:g}"
    )
    console.print(table)
    notes = [
        "Round 1 collects x_avg, so run.rounds is one less. Bits are those of all "
        "clients, up and down."
    ]
    for scheme in found.schemes[1:]:
        most = ", and its bits count every client like the longest message"
        notes.append(
            "DIANA's bound is on the expected value"
            f"{most if scheme.at_most else ''}. DGD is without the table [compress]."
        )
    if not one_each:
        notes.append("--alpha, --rounds or --bits gives a plan with its command.")
    elif any(one.plan.rounds == 0 for one in made):
        notes.append("alpha = 0 leaves every client its own model: nothing to run.")
    console.print("\n".join(notes), markup=False)
    if one_each:
        commands = (_command(one, again) for one in made)
        screen.say(*(f"to run it: {command}" for command in commands if command))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend plan``: solver, rounds, bits and alpha, before anything is run."""

import re
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Format, OutputFormat, Settings, option

if TYPE_CHECKING:
    from fedblend.runs.plan import PlanResult


def plan(
    file: ConfigFile,
    rounds: Annotated[
        int | None, option("Find the largest alpha that R rounds allow.", "R")
    ] = None,
    bits: Annotated[
        float | None, option("Find the largest alpha that B bits allow.", "B")
    ] = None,
    alpha: Annotated[
        float | None, option("Find the rounds and bits that alpha = A needs.", "A")
    ] = None,
    eps: Annotated[float, option("Accuracy to reach: f~ - min f~.", "E")] = 1e-3,
    up: Annotated[
        float | None,
        option(
            "Price of an uploaded bit, relative to --down; default: 1 for both.",
            "PRICE",
        ),
    ] = None,
    down: Annotated[
        float | None, option("Price of a downloaded bit; goes with --up.", "PRICE")
    ] = None,
    trials: Annotated[
        bool,
        typer.Option(
            "--trials/--no-trials",
            help="Run every solver to this accuracy, to count its rounds.",
        ),
    ] = True,
    sets: Settings = None,
    format: OutputFormat = Format.table,
) -> None:
    """Plan the communication of FLIX: solver, rounds, bits and alpha, before a run.

    For algorithm.name = "flix" with a linear model. With --alpha, --rounds or
    --bits it compares solvers, the cheapest first, and prints the command that
    runs it; otherwise a table over alpha for gradient descent. Rounds are those
    of the worst case, those certified for these rows, and typical ones: those by
    which half and 90 % of the seeds of a trial have proved the accuracy.

    [bold]Examples[/bold]

    fedblend plan flix.toml

    fedblend plan flix.toml --alpha 0.3 --eps 1e-4 --up 1 --down 0.1

    fedblend plan flix.toml --rounds 50 --no-trials

    fedblend plan flix.toml --bits 2e7 --format json
    """
    config = screen.load(file, sets)
    from fedblend.errors import SettingError
    from fedblend.runs import plan as planning

    with screen.errors_of(file):
        try:
            found = planning.plan(
                config,
                alpha=alpha,
                rounds=rounds,
                bits=bits,
                eps=eps,
                up=up,
                down=down,
                trials=trials,
            )
        except SettingError as error:
            # Arguments are options here.
            key = re.sub(r"\b(alpha|rounds|bits|eps|up|down)\b", r"--\1", error.key)
            raise typer.BadParameter(f"{key}: {error.why}") from None
    for warning in found.warnings:
        screen.warn(warning)
    again = screen.run_again(file, sets)
    if format is Format.json:
        rows = [{**row, "command": _command(row, again)} for row in found.rows]
        screen.say_json(found._replace(rows=rows).plain())
    else:
        _print(found, again)


def _command(row: dict[str, Any], again: list[str]) -> str | None:
    words = [word for setting in row["settings"] for word in ("--set", setting)]
    return shlex.join([*again, *words]) if words else None


def _print(found: "PlanResult", again: list[str]) -> None:
    """Print plans; ``again`` are the words of the command that runs the file."""
    rows, best, constants = found.rows, found.best, found.constants
    several = ("alpha",) if len({row["alpha"] for row in rows}) > 1 else ()
    tried = any(row["median_rounds"] for row in rows)
    basis = "median" if tried else "certified"
    heads = ["worst", "certified", "up", "down", "certified\ncost"]
    if tried:
        heads[2:4] = ["median", "90 %", "up", "down", "median\ncost"]
    table = screen.table("solver", *several, *heads, right=1)
    least = rows[0][f"{basis}_cost"]
    for number, row in enumerate(rows):
        if best is None and number and row["name"] != rows[number - 1]["name"]:
            table.add_section()
        cells = [_number(row["worst_rounds"]), _number(row["certified_rounds"])]
        if tried:
            more = "" if row["more_than"] is None else f"> {row['more_than']}"
            cells += [more or _number(row["median_rounds"]), _number(row["p90_rounds"])]
        cells += [_bits(row[f"{basis}_up"]), _bits(row[f"{basis}_down"])]
        for name in dict.fromkeys((basis, "certified")):
            cost = row[f"{name}_cost"]
            cells.append("-" if cost is None else f"{cost / least if least else 1:.3g}")
        own = (f"{row['alpha']:.6g}",) if several else ()
        table.add_row(row["name"], *own, *cells)
    console = screen.console()
    console.print(
        f"{found.clients} clients, {found.parameters} parameters: "
        f"L = {constants['L']:.4g}, mu = {constants['mu']:.4g}, "
        f"V = {constants['V']:.4g}\n"
        f"accuracy: f~ - min f~ <= {found.eps:g}"
        + ("" if several else f"; alpha = {rows[0]['alpha']:.6g}")
    )
    console.print(table)
    console.print("\n".join(_notes(found, basis)), markup=False)
    runnable = [row for row in rows if row["settings"] and best and best["alpha"]]
    if runnable:
        which = "the first" if runnable[0] is best else runnable[0]["name"]
        screen.say(f"to run {which}: {_command(runnable[0], again)}")


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number}"


def _bits(number: float | None) -> str:
    from fedblend.report.tables import human_bits

    return "-" if number is None else human_bits(number)


def _notes(found: "PlanResult", basis: str) -> list[str]:
    rows, best, prices = found.rows, found.best, found.prices
    notes = [
        "Columns worst, certified, median and 90 % are rounds. Round 1 collects x_avg, "
        f"so run.rounds is one less. Bits are those of all clients in {basis} rounds."
    ]
    if basis == "median":
        notes.append(
            "By the median half of the seeds were done, by 90 % nine of ten; other "
            "seeds chose. > N: given up after N rounds, at twice the cost of the best."
        )
    if best:
        notes.append(
            f"Cost: up {prices.up:g}, down {prices.down:g}; the first row's of {basis} "
            "rounds is 1."
        )
    if any(row["random"] for row in rows):
        most = any(row["bits_at_most"] for row in rows)
        longest = ", and bits count every client like the longest message"
        notes.append(
            "Rounds by theory of a random solver are of the expected value"
            f"{longest if most else ''}."
        )
    if best is None:
        notes.append("--alpha, --rounds or --bits compares solvers.")
    elif best["alpha"] == 0:
        notes.append("alpha = 0 leaves every client its own model: nothing to run.")
    elif not best["settings"]:
        notes.append("To run the first, leave the table [compress] out.")
    return notes

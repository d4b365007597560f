# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend plan``: what theory promises before anything is run."""

import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.run import Format, compile_cache

if TYPE_CHECKING:
    from fedblend.experiments.plan import Problem, Promise

UNITS = {"": 1.0, "bit": 1.0, "B": 8.0} | {
    f"{prefix}{unit}": size * thousands
    for prefix, thousands in {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, size in {"bit": 1, "B": 8}.items()
}
NAMES = {"dgd": "DGD", "diana": "DIANA"}


def plan(
    file: Annotated[Path, typer.Argument(help="The TOML file of the run.")],
    rounds: Annotated[
        int | None,
        typer.Option(metavar="R", help="The largest alpha that R rounds allow."),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            metavar="B", help="The largest alpha that B bits allow: 1e6, 2.5Mbit, 3MB."
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(metavar="A", help="The rounds and bits that alpha = A needs."),
    ] = None,
    eps: Annotated[
        float, typer.Option(metavar="E", help="The accuracy: f~ - min f~ at the end.")
    ] = 1e-3,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file."),
    ] = None,
    format: Annotated[
        Format, typer.Option(help="json prints the plans and nothing else.")
    ] = Format.table,
) -> None:
    """Plan the communication of FLIX: rounds, bits and alpha, before anything is run.

    For algorithm.name = "flix" with a linear model. Without --rounds, --bits
    or --alpha it is a table over alpha. Plans are for gradient descent (DGD)
    and, where compress.how = "diana", for DIANA with its compressor. What is
    promised holds when run, and a plan comes with the command to do so.

    [bold]Examples[/bold]

    fedblend plan flix.toml

    fedblend plan flix.toml --alpha 0.3 --eps 1e-4

    fedblend plan flix.toml --rounds 50

    fedblend plan flix.toml --bits 20Mbit --format json
    """
    given = {"--rounds": rounds, "--bits": bits, "--alpha": alpha}
    wanted = _checked(given, eps)
    compile_cache()
    from fedblend.config.config import ConfigError, load
    from fedblend.experiments.plan import problem, promises, warnings

    config = load(file, sets or [])
    try:
        found = problem(config)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    made = promises(found, eps, **wanted)
    for warning in warnings(config, found, made):
        screen.note(f"warning: {warning}")
    again = ["fedblend", "run", str(file)]
    again += [word for setting in sets or [] for word in ("--set", setting)]
    if format is Format.json:
        from fedblend.experiments.run_folder import as_json

        typer.echo(as_json(_document(found, made, eps, again)))
    else:
        _print(found, made, eps, again)


def _checked(given: dict[str, Any], eps: float) -> dict[str, Any]:
    """The budget or the alpha, by the name that ``promises`` has for it."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise typer.BadParameter(f"{' and '.join(names)}: give only one of them")
    if not 0 < eps < math.inf:
        raise typer.BadParameter(f"--eps: {eps:g} is not a number above 0")
    rounds, bits, alpha = given.values()
    if rounds is not None and rounds < 0:
        raise typer.BadParameter(f"--rounds: {rounds} is less than 0")
    if alpha is not None and not 0 <= alpha <= 1:
        raise typer.BadParameter(f"--alpha: {alpha:g} is not in [0, 1]")
    return {
        "rounds": rounds,
        "bits": None if bits is None else parsed_bits(bits),
        "alpha": alpha,
    }


def parsed_bits(text: str) -> float:
    """A number of bits, with or without a unit: 1e6, 2.5Mbit, 3 MB."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    try:
        assert match is not None
        bits = float(match[1]) * UNITS[match[2]]
    except (AssertionError, KeyError, ValueError):
        units = ", ".join(unit for unit in UNITS if unit)
        raise typer.BadParameter(
            f"--bits: {text!r} is not a number of bits; write a number from 0 on, "
            f"with or without one of {units}"
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
                "solver": promise.way.solver.name,
                "alpha": promise.plan.alpha,
                "rounds": promise.plan.rounds,
                "bits": promise.plan.bits,
                "bits_at_most": promise.way.at_most,
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
    console = screen.console()
    known = found.known
    console.print(
        f"{known.clients} clients, {found.personal.shape[1]} parameters: L = "
        f"{known.L_alpha:.4g}, mu = {known.mu_alpha:.4g}, V = {known.V:.4g}\n"
        f"accuracy: f~ - min f~ <= {eps:g}"
    )
    console.print(_table(made))
    for line in _remarks(found, made):
        console.print(line, markup=False)
    if len(made) == len(found.ways):
        for command in filter(None, (_command(one, again) for one in made)):
            console.print(f"to run it: {command}", markup=False, soft_wrap=True)


def _table(made: list["Promise"]) -> Any:
    from rich import box
    from rich.table import Table

    from fedblend.report.terminal import human_bits

    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("solver", "alpha", "rounds", "bits", "bound", "algorithm.rate"):
        table.add_column(heading, justify="left" if heading == "solver" else "right")
    for number, (way, plan, rate, _) in enumerate(made):
        if number and way is not made[number - 1].way:
            table.add_section()
        cells = ["-", "-", "no promise"]
        if plan.rounds is not None:
            bits = human_bits(plan.bits or 0)
            cells = [f"{plan.rounds}", bits, f"{plan.bound:.3g}"]
        table.add_row(
            NAMES[way.solver.name], f"{plan.alpha:.6g}", *cells, f"{rate:.6g}"
        )
    return table


def _remarks(found: "Problem", made: list["Promise"]) -> list[str]:
    """What one has to know to read the table."""
    lines = [
        "Round 1 collects x_avg, so run.rounds is one less. Bits are those of all "
        "clients, up and down."
    ]
    for way in found.ways[1:]:
        most = ", and its bits count every client like the longest message"
        lines.append(
            "DIANA's bound is on the expected value"
            f"{most if way.at_most else ''}. DGD is without the table [compress]."
        )
    if len(made) > len(found.ways):
        lines.append("--alpha, --rounds or --bits gives a plan with its command.")
    elif any(one.plan.rounds == 0 for one in made):
        lines.append("alpha = 0 leaves every client its own model: nothing to run.")
    return lines

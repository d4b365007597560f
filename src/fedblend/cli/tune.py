# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend tune``: how much every client should share, from its validation rows."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.run import compile_cache

if TYPE_CHECKING:
    import numpy as np

    from fedblend.simulation.tune_alpha import Tuned


def tune(
    file: Annotated[Path, typer.Argument(help="The TOML file of the run.")],
    alphas: Annotated[
        str, typer.Option(metavar="A,B,...", help="The alphas to try, in [0, 1].")
    ] = "0,0.25,0.5,0.75,1",
    by: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="What decides; the first metric if none."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Where every client's choice goes, and beside it, as FILE.toml, the "
            "configuration with it.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file."),
    ] = None,
) -> None:
    """Choose alpha, the weight of the shared model, on validation rows.

    For flix, flix_local and apfl with learn = "fixed". All alphas are run side by
    side, then every client takes the one that is best on its own validation
    rows. Test rows are shown and have no part in the choice.

    [bold]Examples[/bold]

    fedblend tune flix.toml --set data.validation=0.2

    fedblend tune flix.toml --alphas 0,0.1,0.3,1 --by accuracy --out tuned.csv
    """
    grid = _parsed(alphas)
    compile_cache()
    from fedblend.config.config import ConfigError, load
    from fedblend.experiments.tune import places, tune_config, write

    config = load(file, sets or [])
    if out is not None:
        places(out)
    try:
        found, warnings = tune_config(config, grid, by)
    except KeyboardInterrupt:
        screen.note("interrupted")
        raise typer.Exit(screen.INTERRUPTED) from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for warning in warnings:
        screen.note(f"warning: {warning}")
    again = ["fedblend", "run", str(file)]
    again += [word for setting in sets or [] for word in ("--set", setting)]
    again += ["--set", f"algorithm.alpha={found.common}"]
    _print(found)
    console = screen.console()
    lines = [f"one alpha for all: {shlex.join(again)}"]
    if out is None:
        lines.append("--out FILE.csv writes every client's own, and how to run them.")
    else:
        write(config, found, out)
        beside = shlex.quote(str(out.with_suffix(".toml")))
        lines += [f"every client its own: fedblend run {beside}", f"clients: {out}"]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _parsed(text: str) -> list[float]:
    grid = []
    for word in text.split(","):
        try:
            grid.append(float(word))
        except ValueError:
            grid.append(float("nan"))
        if not 0 <= grid[-1] <= 1:
            raise typer.BadParameter(
                f"--alphas: {word.strip()!r} is not a number in [0, 1]"
            )
    return grid


def _print(found: "Tuned") -> None:
    import numpy as np
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("alpha", "validation", "test", "clients"):
        table.add_column(heading, justify="right")
    test = np.full_like(found.validation, np.nan) if found.test is None else found.test
    for replica, alpha in enumerate(found.alphas):
        count = int((found.replicas == replica).sum())
        means = (_mean(found.validation[replica]), _mean(test[replica]))
        table.add_row(f"{alpha:g}", *means, f"{count}")
    columns = np.arange(len(found.replicas))
    own = [
        _mean(values[found.replicas, columns]) for values in (found.validation, test)
    ]
    table.add_row("its own", *own, f"{len(columns)}")
    console = screen.console()
    console.print(f"mean {found.metric} over clients, and how many chose an alpha")
    console.print(table)
    for line in _remarks(found):
        console.print(line, markup=False)


def _mean(values: "np.ndarray") -> str:
    known = values[abs(values) < float("inf")]
    return f"{known.mean():.4f}" if known.size else "-"


def _remarks(found: "Tuned") -> list[str]:
    lines = [
        "Each alpha trained a shared model. In the last line clients use that of their "
        "own alpha; its validation value is the best of several, its test value is not."
    ]
    count = int(found.unsure.sum())
    if count:
        lines.append(
            f"{count} clients have no finite value on validation rows: alpha = "
            f"{found.common:g}, the best for the others."
        )
    return lines

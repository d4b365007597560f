# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend tune``: every client's alpha, by cross-validation."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Settings, option

if TYPE_CHECKING:
    import numpy as np

    from fedblend.selection.choose import Choice


def tune(
    file: ConfigFile,
    alphas: Annotated[
        str, option("Values of alpha to try, in [0, 1].", "A,B,...")
    ] = "0,0.25,0.5,0.75,1",
    by: Annotated[
        str | None,
        option("Metric that decides; default: the first one measured.", "METRIC"),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "File of all clients' choices; their models go to the folder FILE.",
            "FILE.csv",
        ),
    ] = None,
    folds: Annotated[int, option("Number of folds.", "NUMBER")] = 5,
    sets: Settings = None,
) -> None:
    """Choose alpha, the weight of the shared model, for every client.

    For flix, flix_local_steps and apfl with learn = "fixed". Every client
    cross-validates its training rows, with training alone as one more choice; what
    these tell is combined with what they tell of all others, and what may be worse than
    training alone or than the shared model is avoided. Clients deploy averages of
    models, which predict and export take from the folder. Test rows are shown and do
    not influence the choice.

    [bold]Examples[/bold]

    fedblend tune apfl.toml --out tuned.csv

    fedblend predict tuned new.csv

    fedblend tune flix.toml --alphas 0,0.1,0.3,1 --by accuracy --folds 10
    """
    from fedblend.runs.tune import models_folder, tune_config, write

    grid = _parse(alphas)
    config = screen.load(file, sets)
    folder = None if out is None else models_folder(out)
    with screen.errors_of(file):
        found, built, warnings = tune_config(config, grid, by, folds)
    for warning in warnings:
        screen.warn(warning)
    _print(found)
    if out is None:
        screen.say("--out FILE.csv writes every client's choice, and the models.")
        return
    write(config, built, found, out)
    place = shlex.quote(str(folder))
    screen.say(f"models: fedblend predict {place} TABLE.csv", f"clients: {out}")


def _parse(text: str) -> list[float]:
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


def _print(found: "Choice") -> None:
    import numpy as np

    from fedblend.selection.choose import RANGE, REASONS

    table = screen.table("arm", "folds", "test", "clients", right=0)
    validated, test = found.cross_validation, found.test
    test = np.full_like(validated, np.nan) if test is None else test
    for arm, name in enumerate(found.names):
        means = (_mean(validated[arm]), _mean(test[arm]))
        table.add_row(name, *means, f"{int((found.chosen == arm).sum())}")
    own = found.deployed_test
    own = "-" if own is None else _mean(own)
    table.add_row("deployed", "", own, f"{len(found.chosen)}")
    console = screen.console()
    console.print(
        f"mean {found.metric} over clients, on rows that a fold held out and on test "
        "rows of models trained on all rows, and how many clients chose an arm"
    )
    console.print(table)
    for why, said in REASONS.items():
        count = found.reasons.count(why)
        if count:
            console.print(f"{count} clients: {said}.")
    harm = found.harm.mean()
    low, high = (f"{times * harm:.4f}" for times in RANGE)
    console.print(
        f"Expected harm of what clients deploy: {harm:.4f}, mean over clients, against "
        "the better of training alone and the shared model. The real one is likely "
        f"between {low} and {high}."
    )


def _mean(values: "np.ndarray") -> str:
    known = values[abs(values) < float("inf")]
    return f"{known.mean():.4f}" if known.size else "-"

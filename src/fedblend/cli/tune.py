# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend tune``: every client's alpha, on validation rows or by folds."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Settings, option

if TYPE_CHECKING:
    import numpy as np

    from fedblend.config.config import Config
    from fedblend.selection.choose import Choice
    from fedblend.selection.tune_alpha import Tuned


def tune(
    file: ConfigFile,
    alphas: Annotated[
        str, option("The alphas to try, in [0, 1].", "A,B,...")
    ] = "0,0.25,0.5,0.75,1",
    by: Annotated[
        str | None, option("The metric that decides; default: the first.", "METRIC")
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "Write every client's choice to FILE.csv, and the configuration with these "
            "choices to FILE.toml; with --guard, the models to the run folder FILE.",
            "FILE.csv",
        ),
    ] = None,
    guard: Annotated[
        bool,
        option(
            "Cross-validate the training rows, with training alone as one more choice, "
            "and avoid what may be worse than it or than the shared model."
        ),
    ] = False,
    folds: Annotated[int, option("Number of folds, with --guard.", "NUMBER")] = 5,
    sets: Settings = None,
) -> None:
    """Choose alpha, the weight of the shared model, for every client.

    For flix, flix_local_steps and apfl with learn = "fixed". All alphas run side by
    side, then every client takes the one that is best on its own validation
    rows. Test rows are shown and do not influence the choice.

    With --guard no validation rows are needed: every client cross-validates its
    training rows, and what these tell is combined with what they tell of all others.
    Clients deploy averages of models, which predict and export take from the folder.

    [bold]Examples[/bold]

    fedblend tune apfl.toml --guard --out tuned.csv

    fedblend predict tuned new.csv

    fedblend tune flix.toml --set data.validation=0.2

    fedblend tune flix.toml --alphas 0,0.1,0.3,1 --by accuracy --out tuned.csv
    """
    grid = _parsed(alphas)
    config = screen.load(file, sets)
    if guard:
        _guarded(config, file, grid, by, folds, out)
        return
    from fedblend.runs.tune import check_out, tune_config, write

    if out is not None:
        check_out(out)
    with screen.errors_of(file):
        found, warnings = tune_config(config, grid, by)
    for warning in warnings:
        screen.warn(warning)
    _print(found)
    again = [*screen.run_again(file, sets), "--set", f"algorithm.alpha={found.common}"]
    screen.say(f"one alpha for all: {shlex.join(again)}")
    if out is None:
        screen.say("--out FILE.csv writes every client's own, and how to run them.")
        return
    write(config, found, out)
    beside = shlex.quote(str(out.with_suffix(".toml")))
    screen.say(f"every client its own: fedblend run {beside}", f"clients: {out}")


def _guarded(
    config: "Config",
    file: Path,
    grid: list[float],
    by: str | None,
    folds: int,
    out: Path | None,
) -> None:
    from fedblend.runs.guard import check_place, folder_of, guard_config, write

    if out is not None:
        check_place(out)
    with screen.errors_of(file):
        found, built, warnings = guard_config(config, grid, by, folds)
    for warning in warnings:
        screen.warn(warning)
    _print_choice(found)
    if out is None:
        screen.say("--out FILE.csv writes every client's choice, and the models.")
        return
    write(config, built, found, out)
    place = shlex.quote(str(folder_of(out).path))
    screen.say(f"models: fedblend predict {place} TABLE.csv", f"clients: {out}")


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

    table = screen.table("alpha", "validation", "test", "clients", right=0)
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
    console.print(
        "Each alpha trained a shared model. In the last line clients use that of their "
        "own alpha; its validation value is the best of several, its test value is not."
    )
    count = int(found.unsure.sum())
    if count:
        console.print(
            f"{count} clients have no finite value on validation rows: alpha = "
            f"{found.common:g}, the best for the others."
        )


def _print_choice(found: "Choice") -> None:
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

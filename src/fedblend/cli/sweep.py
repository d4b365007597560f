# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend sweep``: a configuration at every point of a grid."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.compare import (
    Figures,
    Metrics,
    Resume,
    TableOption,
    Target,
    show,
    watch_steps,
)
from fedblend.cli.screen import ConfigFile, Settings, option


def sweep(
    file: ConfigFile,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="KEY=VALUES",
            help="Values of a key: FIRST:LAST:STEP, or VALUE,VALUE,...",
        ),
    ],
    seeds: Annotated[int | None, option("Run so many seeds.", "N")] = None,
    sets: Settings = None,
    out: Annotated[Path, option("Folder of the sweep.", "FOLDER")] = Path("runs/sweep"),
    metric: Metrics = None,
    target: Target = None,
    table: TableOption = None,
    figures: Figures = False,
    resume: Resume = False,
) -> None:
    """Run a configuration for every value of a key, and compare the values.

    Values that are real numbers of the algorithm, such as a rate or alpha, run as one
    compiled program together with all seeds; others run one after another. Every value
    gets the folder of an ordinary run.

    [bold]Examples[/bold]

    fedblend sweep flix.toml --over algorithm.alpha=0:1:0.1 --seeds 5

    fedblend sweep apfl.toml --over algorithm.rate=0.01,0.1,1 --over run.cohort=5,10
    """
    screen.compile_cache()
    from fedblend.runs.compare import sweep as run_all

    with watch_steps() as on_step:
        made = run_all(
            file,
            over,
            out,
            seeds=seeds,
            resume=resume,
            metrics=metric,
            target=target,
            figures=figures,
            sets=sets or (),
            on_step=on_step,
            on_warning=screen.warn,
        )
    show(made.comparison, out, table)
    if made.chosen is not None and table is None:
        screen.say(f"best on validation rows: {made.chosen}")
    elif table is None:
        screen.say(
            "The table is of test rows: to choose a value, set data.validation=0.2."
        )

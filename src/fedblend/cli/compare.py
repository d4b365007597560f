# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend compare`` and ``fedblend sweep``: several configurations, side by side."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import ConfigFile, Settings, option

if TYPE_CHECKING:
    from fedblend.runs.comparison import Comparison


class TableFormat(StrEnum):
    """How a table for a paper is printed."""

    latex = "latex"
    markdown = "markdown"


AGAIN = "interrupted; the same command with --resume continues"
TableOption = Annotated[
    TableFormat | None, option("Print the table for a paper: latex or markdown.")
]
Target = Annotated[
    str | None,
    option("Count rounds and bits until a metric reaches a value.", "METRIC=X"),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric", metavar="METRIC", help="Metric to test; default: the main metric."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue after an interruption.")
]


def compare(
    entries: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG...", help="TOML files, or folders of finished runs."
        ),
    ],
    out: Annotated[Path, option("Folder of the comparison.", "FOLDER")] = Path(
        "runs/comparison"
    ),
    seeds: Annotated[int | None, option("Number of seeds.", "N")] = None,
    sets: Settings = None,
    metric: Metrics = None,
    target: Target = None,
    table: TableOption = None,
    resume: Resume = False,
) -> None:
    """Run configurations on the same clients and splits, and compare them.

    Every pair of methods is compared client by client on the same test rows; p-values
    are corrected for all comparisons. The folder has every run, tidy tables as CSV, and
    tables for a paper.

    [bold]Examples[/bold]

    fedblend compare fedavg.toml apfl.toml --seeds 5

    fedblend compare runs/fedavg runs/apfl --table latex

    fedblend compare *.toml --seeds 5 --target accuracy=0.9
    """
    screen.compile_cache()
    from fedblend.runs.compare import compare as run_all

    with screen.interruptible(AGAIN), screen.watch_steps() as on_step:
        made = run_all(
            entries,
            out,
            seeds=seeds,
            resume=resume,
            metrics=metric,
            target=target,
            sets=sets or (),
            on_step=on_step,
            on_warning=screen.warn,
        )
    show(made, out, table)


def show(made: "Comparison", out: Path, table: TableFormat | None) -> None:
    """Print a comparison: the table, and what is significant."""
    if table is not None:
        text = made.latex() if table is TableFormat.latex else made.markdown()
        typer.echo(text, nl=False)
        return
    shown = screen.table(
        "method", *(column.head for column in made.table.columns), right=1
    )
    cells = made.table.cells(" ± ")
    for name, texts in zip(made.table.rows, cells, strict=True):
        marked = [f"[bold]{text}[/bold]" if best else text for text, best in texts]
        shown.add_row(name, *marked)
    screen.console().print(shown)
    screen.say(made.table.caption)
    sure = [one for one in made.differences if one.significant]
    for one in sure[:MOST_SHOWN]:
        mean, low, high = one.gain.mean
        first, second = (one.name, one.other)[:: 1 if mean > 0 else -1]
        ends = sorted((abs(low), abs(high)))
        screen.say(
            f"{first} is better than {second} by {abs(mean):.3g} {one.metric} "
            f"({ends[0]:.3g} to {ends[1]:.3g}, p = {one.corrected:.2g} corrected)"
        )
    if len(sure) > MOST_SHOWN:
        screen.say(f"and {len(sure) - MOST_SHOWN} more in {out / 'differences.csv'}")
    runs = shlex.join(str(path) for path in made.folders.values())
    screen.say(f"results: {out}", f"as a page: fedblend report {runs}")


MOST_SHOWN = 8
"""Differences on the screen."""


def sweep(
    file: ConfigFile,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="KEY=VALUES",
            help="A key and its values: FIRST:LAST:STEP, or VALUE,VALUE,...",
        ),
    ],
    seeds: Annotated[int | None, option("Number of seeds.", "N")] = None,
    sets: Settings = None,
    out: Annotated[Path, option("Folder of the sweep.", "FOLDER")] = Path("runs/sweep"),
    metric: Metrics = None,
    target: Target = None,
    table: TableOption = None,
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

    with screen.interruptible(AGAIN), screen.watch_steps() as on_step:
        made = run_all(
            file,
            over,
            out,
            seeds=seeds,
            resume=resume,
            metrics=metric,
            target=target,
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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend auto`` and ``fedblend demo``: from a table to what to deploy."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.data import HEART
from fedblend.cli.screen import option


def auto(
    table: Annotated[
        Path, typer.Argument(help="A .csv, .tsv or .parquet file; .gz, .zip.")
    ],
    client: Annotated[str, option("Column with the client of each row.", "COLUMN")],
    target: Annotated[str, option("Column to predict.", "COLUMN")],
    minutes: Annotated[float, option("Time budget in minutes.", "N", min=0.1)] = 5.0,
    kind: Annotated[
        str | None,
        option(
            "classes, binary, regression or counts; default: by the target's values.",
            "KIND",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        option("Column to predict from; repeat for more. Default: all.", "COLUMN"),
    ] = None,
    drop: Annotated[
        list[str] | None,
        option("Column to leave out; repeat for more.", "COLUMN"),
    ] = None,
    scale: Annotated[
        str | None,
        option(
            "log or linear, of a target that is a number; default: by its values.",
            "SCALE",
        ),
    ] = None,
    once: Annotated[
        bool,
        option("Compare linear methods by sums that clients send, and not by rows."),
    ] = False,
    keep: Annotated[
        list[str] | None,
        option("Column to leave as it is; repeat for more.", "COLUMN"),
    ] = None,
    time: Annotated[
        str | None,
        option("Column of dates or numbers: test each client's last rows.", "COLUMN"),
    ] = None,
    group: Annotated[
        str | None,
        option("Column whose equal values are tested together: a patient.", "COLUMN"),
    ] = None,
    event: Annotated[
        str | None,
        option("Column of 1 (event seen) and 0 (censored); target: time.", "COLUMN"),
    ] = None,
    out: Annotated[
        Path | None, option("Folder of the results; default: runs/TABLE.", "FOLDER")
    ] = None,
) -> None:
    """Compare methods on your own table, and say what to deploy and who gains.

    Needs no configuration. Every method is tuned on validation rows; test rows tell who
    gains. The same command continues if it was interrupted. The folder has the page,
    every client's model, and a configuration to continue with.

    [bold]Examples[/bold]

    fedblend data example heart.csv

    fedblend auto heart.csv --client center --target disease
    """
    screen.compile_cache()
    from fedblend.data.readers.tables import table_name
    from fedblend.runs.auto import auto as compared
    from fedblend.runs.auto.comparison import Screen

    place = out or Path("runs") / (table_name(table) or "auto")
    with (
        screen.interruptible("interrupted; the same command continues"),
        screen.lasting_interrupt() as stop,
    ):
        compared(
            table,
            client=client,
            target=target,
            minutes=minutes,
            out=place,
            kind=kind,
            inputs=inputs or (),
            drop=drop or (),
            scale=scale,
            once=once,
            keep=keep or (),
            time=time,
            group=group,
            event=event,
            screen=Screen(screen.note, stop),
        )
    print_comparison(place)


def print_comparison(place: Path) -> None:
    """Print the methods and the verdict of a finished comparison."""
    from fedblend.metrics import main_first
    from fedblend.report.tables import human_bits
    from fedblend.runs.auto import AutoResult

    found = AutoResult(place)
    # Accuracy hides what a rare class needs.
    second = "auc" if "auc" in found.metrics else main_first(found.metrics)[1]
    metrics = list(dict.fromkeys([found.metric, second]))
    made = screen.table("method", *metrics, "over alone", "bits per client", right=1)
    for row in found.table:
        cells = [_number(row[f"test_{name}"], "{:#.4g}") for name in metrics]
        gain, bits = _number(row["mean_gain"], "{:+.2g}"), row["bits_per_client"]
        sent = "-" if bits == "" else human_bits(bits)
        made.add_row(found.titles[row["method"]], *cells, gain, sent)
    screen.console().print(made)
    screen.say(*found.verdict, *filter(None, [found.deployed]))
    if (place / "report.html").is_file():
        screen.say(f"page: {place / 'report.html'}")
    screen.say(f"results: {place}")
    if (place / "config.toml").is_file():
        again = shlex.join(["fedblend", "run", str(place / "config.toml")])
        screen.say(f"to continue: {again}")


def _number(value: Any, style: str) -> str:
    return "-" if value == "" else style.format(value)


def demo(
    out: Annotated[Path, option("Folder of the results.")] = Path("runs/heart"),
) -> None:
    """Compare methods on heart patients of four hospitals, and say what to deploy.

    It is fedblend auto on the table that fedblend data example writes.

    [bold]Example[/bold]

    fedblend demo --out runs/heart
    """
    auto(HEART, client="center", target="disease", out=out)

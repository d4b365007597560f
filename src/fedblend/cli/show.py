# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend show``: the results of a run."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.screen import option


class RunFormat(StrEnum):
    """How a run is printed."""

    table = "table"
    csv = "csv"
    json = "json"


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    format: Annotated[
        RunFormat, option("csv prints every measured number on a line of its own.")
    ] = RunFormat.table,
) -> None:
    """Show a run: a table of its models, its costs, and a plot.

    With --format json the summary is printed, as in summary.json.

    [bold]Examples[/bold]

    fedblend show runs/first

    fedblend show runs/first --format csv > records.csv
    """
    from fedblend.errors import RunError
    from fedblend.report.terminal import show as show_rows
    from fedblend.runs.run_folder import Folder, read_rows, read_summary

    run = Folder(folder)
    if not run.config.is_file():
        raise RunError(f"{folder}: is not the folder of a run (no config.toml)")
    if not run.metrics.is_file():
        raise RunError(f"{folder}: this run has no results yet; --resume continues it")
    rows = read_rows(run)
    finished = run.summary.is_file()
    last = list({row.get("seed"): row for row in rows}.values())
    summary: dict[str, Any] = read_summary(run) if finished else {"runs": last}
    if format is not RunFormat.table:
        _print(rows, summary, format, folder)
        return
    try:
        show_rows(rows, summary["runs"], screen.console(), summary)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise RunError(f"{folder}: its results are damaged") from None
    for text in summary.get("warnings", ()):
        screen.warn(text)
    if not finished:
        screen.say("not finished: fedblend run ... --resume continues it")


def _print(
    rows: list[dict[str, Any]], summary: dict[str, Any], format: RunFormat, folder: Path
) -> None:
    """Print a run for other programs."""
    from fedblend.errors import RunError
    from fedblend.report.records import tidy
    from fedblend.runs.run_folder import as_json, csv_text

    if format is RunFormat.json:
        typer.echo(as_json(summary))
        return
    try:
        lines = tidy(rows)
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{folder}: its results are damaged") from None
    columns = list(dict.fromkeys(name for line in lines for name in line))
    cells = ([line.get(name, "") for name in columns] for line in lines)
    typer.echo(csv_text(columns, cells), nl=False)

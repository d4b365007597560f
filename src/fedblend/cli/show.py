# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend show``: the results of a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedblend.cli import screen


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
) -> None:
    """Show a run: a table of its models, its costs, and a plot.

    [bold]Example[/bold]

    fedblend show runs/first
    """
    from fedblend.errors import RunError
    from fedblend.experiments.run_folder import Folder, read_rows, read_summary
    from fedblend.report.terminal import show as show_rows

    run = Folder(folder)
    if not run.config.is_file():
        raise RunError(f"{folder}: is not the folder of a run (no config.toml)")
    if not run.metrics.is_file():
        raise RunError(f"{folder}: this run has no results yet; --resume continues it")
    rows = read_rows(run)
    finished = run.summary.is_file()
    last = list({row.get("seed"): row for row in rows}.values())
    summary: dict[str, Any] = read_summary(run) if finished else {"runs": last}
    try:
        show_rows(rows, summary["runs"], screen.console(), summary)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise RunError(f"{folder}: its results are damaged") from None
    for text in summary.get("warnings", ()):
        screen.warn(text)
    if not finished:
        screen.say("not finished: fedblend run ... --resume continues it")

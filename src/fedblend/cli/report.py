# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend show`` and ``fedblend report``: runs in the terminal and as HTML."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.auto import print_comparison
from fedblend.cli.screen import Format, OutputFormat, option


def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    format: OutputFormat = Format.table,
) -> None:
    """Show a run: a table of its models, the verdict, and its costs.

    The folder of fedblend auto shows all its methods. With --format json the summary is
    printed, as in summary.json or auto.json.

    [bold]Example[/bold]

    fedblend show runs/first
    """
    from fedblend.errors import RunError
    from fedblend.report.terminal import show as show_summary
    from fedblend.runs.run_folder import (
        AUTO,
        Folder,
        read_comparison,
        read_rows,
        read_summary,
    )

    if (folder / AUTO).is_file():
        state = read_comparison(folder)
        if format is Format.json:
            screen.say_json(state)
        else:
            print_comparison(folder)
        return
    run = Folder(folder)
    if not run.config.is_file():
        raise RunError(f"{folder}: is not the folder of a run (no config.toml)")
    if not run.metrics.is_file():
        raise RunError(f"{folder}: this run has no results yet; --resume continues it")
    rows = read_rows(run)
    finished = run.summary.is_file()
    last = list({row.get("seed"): row for row in rows}.values())
    summary: dict[str, Any] = read_summary(run) if finished else {"runs": last}
    if format is Format.json:
        screen.say_json(summary)
        return
    try:
        show_summary(summary, screen.console())
    except (KeyError, TypeError, AttributeError, IndexError):
        file = run.summary if finished else run.metrics
        raise RunError(f"{file}: is damaged; run the experiment again") from None
    for text in summary.get("warnings", ()):
        screen.warn(text)
    if not finished:
        screen.say("not finished: fedblend run ... --resume continues it")


REPORT = "report.html"


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs, or of a comparison or sweep."
        ),
    ],
    open_: Annotated[
        bool, typer.Option("--open", help="Open the file in a browser.")
    ] = False,
    out: Annotated[
        Path | None,
        option("HTML file to write; default: report.html in the folder.", "FILE"),
    ] = None,
    client: Annotated[
        str | None,
        option("Write a page about this client only, by id or name.", "ID"),
    ] = None,
) -> None:
    """Write runs as one HTML file that needs no network and nothing installed.

    With --client the file is about one client and holds nothing of the others.

    [bold]Examples[/bold]

    fedblend report runs/first --open

    fedblend report runs/flix runs/apfl --out compared.html

    fedblend report runs/first --client hospital-7
    """
    from fedblend.config.tables.adapt import require_base
    from fedblend.errors import RunError
    from fedblend.report.page import write_page

    for folder in folders:
        require_base(folder / "config.toml")
    file = out or default_file(folders, client)
    if file.is_dir():
        raise RunError(f"--out: {file} is a folder; name a file, such as {REPORT}")
    written = write_page(folders, file, client=client)
    screen.say(f"report: {written}")
    if open_ and not show_in_browser(written):
        screen.warn(f"no browser was found; open {written} in one")


def default_file(folders: Sequence[Path], client: str | None = None) -> Path:
    """Where the report goes if no file is named: into the folder if there is one."""
    name = REPORT
    if client is not None:
        own = re.sub(r"[^\w.-]+", "-", client)
        name = f"report-{own}.html"
    return folders[0] / name if len(folders) == 1 else Path(name)


def show_in_browser(file: Path) -> bool:
    """Open a file in the user's browser; False where there is none."""
    import webbrowser

    return webbrowser.open(file.resolve().as_uri())

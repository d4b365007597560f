# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend data``: list, download and describe datasets, write an example."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Format, OutputFormat, option

if TYPE_CHECKING:
    from fedblend.data.dataset import DatasetInfo, PublicFiles

app = typer.Typer(
    help="List, download and describe datasets.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
HEART = Path(__file__).parents[1] / "data" / "heart.csv"
"""The example table; ``heart.license.txt`` beside it has its source and license."""
Name = Annotated[
    str, typer.Argument(help="Name of the dataset, one of `fedblend data list`.")
]


@app.command("list")
def list_() -> None:
    """List all datasets, and whether their files are on this machine."""
    from fedblend.data.datasets import DATASETS

    made = screen.table(
        "name", "rows", "test", "classes", "clients", "files", "what it is"
    )
    for name, info in DATASETS.items():
        cells = ["-" if number is None else str(number) for number in info.size]
        made.add_row(name, *cells, _presence(info), info.summary)
    screen.console().print(made)


def _presence(info: "DatasetInfo") -> str:
    if not info.needs:
        return "built in" if info.license != "Your own" else "your own"
    if all(files.usable for files in info.needs):
        return "here"
    if info.needs[0].usable:
        return "in part"
    return "by hand" if info.needs[0].instruction else "to get"


@app.command("get")
def get(
    name: Name,
    base: Annotated[str | None, option("Address of a mirror of the files.")] = None,
) -> None:
    """Download the files of a dataset to the cache and check them.

    [bold]Example[/bold]

    fedblend data get mnist
    """
    from fedblend.data.dataset import DATASETS, DataError
    from fedblend.errors import hint

    known = {one.name: (one,) for info in DATASETS.values() for one in info.needs}
    known |= {name: info.needs for name, info in DATASETS.items()}
    if name not in known:
        public = sorted(one for one, files in known.items() if files)
        raise DataError(
            f"{name!r} is not a public dataset with files; {hint(name, public)}"
        )
    if not known[name]:
        typer.echo(f"{name}: needs no files")
    for files in known[name]:
        for path in _download(files, base):
            typer.echo(str(path))


def _download(files: "PublicFiles", base: str | None) -> list[Path]:
    """Download one public dataset, with a progress bar in a terminal."""
    from rich import progress

    console = screen.console(stderr=True)
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(files.name, total=None)

        def report(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        return files.get(report, base)


@app.command("example")
def example(
    file: Annotated[Path, typer.Argument(help="CSV file to write.")],
) -> None:
    """Write a real table to try things with: heart patients of four hospitals.

    The client is the column center, the target the column disease. The table is the
    Heart Disease data set of the UCI Machine Learning Repository (Janosi, Steinbrunn,
    Pfisterer, Detrano), under CC BY 4.0.

    [bold]Example[/bold]

    fedblend data example heart.csv
    """
    from fedblend.errors import RunError

    if file.suffix != ".csv":
        raise RunError(f"{file}: a table is written as .csv")
    if file.exists():
        raise RunError(f"{file}: exists already and is not overwritten")
    file.write_bytes(HEART.read_bytes())
    typer.echo(f"wrote {file}: 920 rows of 4 hospitals (UCI Heart Disease, CC BY 4.0)")


@app.command("describe")
def describe(
    file: Annotated[Path, typer.Argument(help="Table: .csv, .parquet or .npz.")],
    client: Annotated[
        str | None, option("Column with the client of each row.", "NAME")
    ] = None,
    target: Annotated[str | None, option("Column to predict.", "NAME")] = None,
    format: OutputFormat = Format.table,
) -> None:
    """Show what every column of a table holds, and what preprocessing makes of it.

    [bold]Example[/bold]

    fedblend data describe heart.csv --client center --target disease
    """
    from fedblend.data.description import describe

    found = describe(file, client=client, target=target)
    if format is Format.json:
        screen.say_json(found._asdict())
        return
    screen.say(*found.lines)
    made = screen.table("column", "what it holds", "what is made of it", "inputs")
    for one in found.columns:
        made.add_row(one["column"], one["seen"], one["done"], str(one["inputs"]))
    screen.console().print(made)
    for text in found.notes:
        screen.note(f"note: {text}")


@app.command("info")
def info(name: Name) -> None:
    """Describe a dataset: rows, terms, options, files.

    [bold]Example[/bold]

    fedblend data info femnist
    """
    from fedblend.config.toml import literal
    from fedblend.data import datasets

    found = datasets.info(name)
    lines = [f"{name}: {found.summary}"]
    labels = ("training rows", "test rows", "classes", "natural clients")
    for label, number in zip(labels, found.size, strict=True):
        if number is not None:
            lines.append(f"  {label}: {number}")
    lines.append(f"  terms: {found.license}")
    for key, parameter in found.options.items():
        if parameter.default is parameter.empty:
            value = "must be given"
        elif parameter.default is None:
            value = "may be given"
        else:
            value = f"default {literal(parameter.default)}"
        lines.append(f"  option {key}: {value}")
    for files in found.needs:
        lines += [f"  {line}" for line in files.describe()]
    typer.echo("\n".join(lines))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend init``: a first configuration, from ``first.toml`` or for a table."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli.screen import option

TEMPLATE = Path(__file__).with_name("first.toml")


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path(
        "first.toml"
    ),
    data: Annotated[Path | None, option("Your own table, CSV or Parquet.", "T")] = None,
    client: Annotated[str | None, option("Its column of clients.", "C")] = None,
    target: Annotated[str | None, option("Its column to predict.", "C")] = None,
    algorithm: Annotated[
        str | None, option("Name of the algorithm; default: finetune.", "NAME")
    ] = None,
) -> None:
    """Write a configuration that is ready to run.

    Without --data it is a commented one, for handwritten digits.

    [bold]Examples[/bold]

    fedblend init first.toml && fedblend run first.toml

    fedblend init mine.toml --data t.csv --client hospital --target outcome
    """
    from fedblend.errors import RunError

    if file.exists():
        raise RunError(f"{file}: exists already and is not overwritten")
    name = file.stem.replace('"', "") or "first"
    if data is None:
        text = TEMPLATE.read_text().replace("run first.toml", f"run {file}")
        text = text.replace('"first"', f'"{name}"')
        text = text.replace("runs/first", f"runs/{name}")
    else:
        text = _fill_table(file, data, client, target, algorithm)
    with file.open("x") as written:
        written.write(text)
    typer.echo(f"wrote {file}; run it with: fedblend run {file}")


def _fill_table(
    file: Path,
    data: Path,
    client: str | None,
    target: str | None,
    algorithm: str | None,
) -> str:
    """The configuration of a table: its keys, and all that is chosen for it."""
    from fedblend.config import toml
    from fedblend.config.config import check, fill
    from fedblend.data.dataset import MissingDataError
    from fedblend.errors import ConfigError

    for key, column in (("--client", client), ("--target", target)):
        if column is None:
            raise ConfigError(f"{key}: is missing; it names a column of {data}")
    if not data.exists():
        raise MissingDataError(f"{data}: no such file")
    place = Path(os.path.relpath(data, file.parent)).as_posix()
    table = {"file": place, "client": client, "target": target}
    usual = toml.read(TEMPLATE)["algorithm"]["name"]
    content = {"data": table, "algorithm": {"name": algorithm or usual}}
    check(content, str(file), file.parent)
    head = f"# A run of fedblend. Start it with: fedblend run {file}\n"
    return f"{head}{toml.write(fill(content, file.stem))}"

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend init``: a first configuration, from ``first.toml``."""

from pathlib import Path
from typing import Annotated

import typer

TEMPLATE = Path(__file__).with_name("first.toml")


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path(
        "first.toml"
    ),
) -> None:
    """Write a configuration with comments, for handwritten digits, ready to run.

    [bold]Example[/bold]

    fedblend init first.toml && fedblend run first.toml
    """
    from fedblend.errors import RunError

    if file.exists():
        raise RunError(f"{file}: exists already and is not overwritten")
    name = file.stem.replace('"', "") or "first"
    text = TEMPLATE.read_text().replace("run first.toml", f"run {file}")
    text = text.replace('"first"', f'"{name}"').replace("runs/first", f"runs/{name}")
    with file.open("x") as written:
        written.write(text)
    typer.echo(f"wrote {file}; run it with: fedblend run {file}")

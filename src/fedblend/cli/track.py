# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend track``: the records of a run for a tracker, after the fact."""

from pathlib import Path
from typing import Annotated

import typer

from fedblend.cli import screen
from fedblend.cli.screen import Imports, option


def track(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    to: Annotated[
        list[str],
        option("tensorboard, mlflow or wandb; may be given several times.", "NAME"),
    ],
    imports: Imports = False,
) -> None:
    """Write the records of a run for a tracker; fedblend run --track does it live.

    Files are in RUN/NAME. Tracked again, a run has no point twice.

    [bold]Examples[/bold]

    fedblend track runs/first --to tensorboard

    fedblend track runs/first --to mlflow --to wandb
    """
    from fedblend.cli.run import tracked
    from fedblend.errors import RunError
    from fedblend.runs.run_folder import Folder, read_config

    place = Folder(folder)
    config = read_config(place, imports=imports)
    if not place.metrics.is_file():
        raise RunError(f"{folder}: this run has no results yet; --resume continues it")
    with screen.interruptible(), tracked(folder, config, to) as note_rows:
        note_rows()

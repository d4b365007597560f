# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend run`` and ``fedblend track``: a configuration, from file to results."""

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen
from fedblend.cli.report import REPORT
from fedblend.cli.screen import (
    ConfigFile,
    Format,
    Imports,
    OutputFormat,
    Settings,
    option,
)

if TYPE_CHECKING:
    from fedblend.config.config import Config
    from fedblend.runs.run import Step


def run(
    file: ConfigFile,
    sets: Settings = None,
    seed: Annotated[
        list[str] | None, option("One seed, or several that run side by side.", "N...")
    ] = None,
    devices: Annotated[
        int | None, option("Largest number of devices (CPU cores or GPUs).", "N")
    ] = None,
    out: Annotated[
        Path | None, option("Folder of the results; default: runs/NAME.", "FOLDER")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run.")
    ] = False,
    track: Annotated[
        list[str] | None,
        option("Tracker: tensorboard, mlflow or wandb; repeat for more.", "NAME"),
    ] = None,
    format: OutputFormat = Format.table,
) -> None:
    """Run the configuration in a TOML file and write the results to a folder.

    [bold]Examples[/bold]

    fedblend run first.toml

    fedblend run first.toml --set algorithm.rate=0.05 --set run.rounds=50

    fedblend run first.toml --seed 1 2 3 --out runs/seeds

    fedblend run first.toml --out runs/seeds --seed 1 2 3 --resume

    fedblend run first.toml --track tensorboard
    """
    settings = [*(sets or []), *_seed_setting(seed or [])]
    if devices is not None:
        settings.append(f"run.devices={devices}")
    config = screen.load(file, settings)
    out = out or results_folder(config)
    from fedblend.runs.run import run_config

    _show_chosen(file, settings, out)
    same = f"--out {shlex.quote(str(out))} --resume"
    with (
        screen.errors_of(file, f"interrupted; the same command with {same} continues"),
        screen.watch_steps() as watch,
        follow(out, config, track or []) as note_rows,
    ):

        def report(step: "Step") -> None:
            watch(config.name, step)
            note_rows()

        summary = run_config(
            config,
            out,
            resume=resume,
            on_step=report,
            on_warning=screen.warn,
        )
        note_rows()
    from fedblend.report.page import write_page

    page = write_page([out], out / REPORT)
    show_summary(out, summary, format)
    if format is Format.table:
        screen.say(f"report: {page}")


@contextlib.contextmanager
def follow(
    out: Path, config: "Config", names: list[str]
) -> Iterator[Callable[[], None]]:
    """Have trackers follow a run; the function writes the rows it has by now."""
    if not names:
        yield lambda: None
        return
    from fedblend.extras import require
    from fedblend.runs.run_folder import Folder, read_rows

    interop = require("fedblend_interop.trackers", "trackers", extra="trackers")
    words = [word.strip() for name in names for word in name.split(",")]
    tables = config.model_dump(exclude_none=True)
    trackers = interop.folder_trackers(words, out, config.name, tables)
    folder = Folder(out)

    def note_rows() -> None:
        if folder.metrics.is_file():
            rows = read_rows(folder)
            for tracker in trackers:
                tracker.update(rows)

    try:
        yield note_rows
    finally:
        for tracker in trackers:
            tracker.close()
    for word in dict.fromkeys(words):
        screen.note(f"{word}: {out / word}")


def _show_chosen(file: Path, settings: list[str], out: Path) -> None:
    """Say which keys were chosen because the file leaves them out."""
    from fedblend.config.config import keys_left_out
    from fedblend.config.toml import literal

    found = keys_left_out(file, settings)
    keys = [f"{key} = {literal(of)}" for key, of in found.items() if "." in key]
    if keys:
        screen.note(f"chosen: {', '.join(keys)}; {out / 'config.toml'} has every key")


def results_folder(config: "Config") -> Path:
    """The folder of the results if no other is named."""
    return Path("runs") / re.sub(r"[^\w.-]+", "-", config.name)


def show_summary(
    out: Path, summary: dict[str, Any], format: Format = Format.table
) -> None:
    """Print the results of a finished run."""
    from fedblend.report.terminal import show

    if format is Format.json:
        screen.say_json(summary)
        return
    show(summary, screen.console())
    screen.say(f"results: {out}")


def _seed_setting(seeds: list[str]) -> list[str]:
    """``--seed`` as a setting of ``run.seed``."""
    numbers = []
    for word in (word.strip() for text in seeds for word in text.split(",")):
        if not word.isdecimal():
            raise typer.BadParameter(f"--seed: {word!r} is not a whole number from 0")
        numbers.append(str(int(word[:20])))
    if len(numbers) > 1:
        return [f"run.seed=[{', '.join(numbers)}]"]
    return [f"run.seed={number}" for number in numbers]


def join_seeds(arguments: list[str]) -> list[str]:
    """``--seed 1 2 3`` as ``--seed 1,2,3``, which option parsers understand.

    ``--seed=1 2 3`` is understood too.
    """
    joined: list[str] = []
    numbers = False
    for word in arguments:
        if numbers and word.isdecimal() and joined[-1] != "--seed":
            joined[-1] = f"{joined[-1]},{word}"
            continue
        begins = word == "--seed" or word.startswith("--seed=")
        numbers = begins or (numbers and joined[-1] == "--seed")
        joined.append(word)
    return joined


def track(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    to: Annotated[
        list[str],
        option("Tracker: tensorboard, mlflow or wandb; repeat for more.", "NAME"),
    ],
    imports: Imports = False,
) -> None:
    """Write the records of a run for a tracker; fedblend run --track does it live.

    Files are in RUN/NAME. Tracked again, a run has no point twice.

    [bold]Examples[/bold]

    fedblend track runs/first --to tensorboard

    fedblend track runs/first --to mlflow --to wandb
    """
    from fedblend.errors import RunError
    from fedblend.runs.run_folder import Folder, read_config

    place = Folder(folder)
    config = read_config(place, imports=imports)
    if not place.metrics.is_file():
        raise RunError(f"{folder}: this run has no results yet; --resume continues it")
    with screen.interruptible(), follow(folder, config, to) as note_rows:
        note_rows()

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What commands share: their options, the configuration they load, the screen.

Results go to stdout, everything else to stderr.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedblend.config.config import Config
    from fedblend.runs.run import Step

BAD_INPUT = 2
INTERRUPTED = 130


class Format(StrEnum):
    """How results are printed."""

    table = "table"
    json = "json"


def option(help: str, metavar: str | None = None, **more: Any) -> Any:
    """An option of a command: its help, and the name of its value there."""
    return typer.Option(help=help, metavar=metavar, **more)


ConfigFile = Annotated[Path, typer.Argument(help="TOML file of the run.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the file; repeat for more."
    ),
]
Seed = Annotated[
    int | None, option("Seed whose models to take; default: the first of the run.", "N")
]
Imports = Annotated[
    bool,
    typer.Option(
        "--imports", help="Import code that the run names; only if you trust it."
    ),
]
OutputFormat = Annotated[Format, option("json prints JSON and no table.")]


def console(*, stderr: bool = False) -> Any:
    """A rich console; made anew, so that it follows redirections."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def say(*lines: str) -> None:
    """Print lines of results; a terminal wraps long ones."""
    for line in lines:
        console().print(line, markup=False, soft_wrap=True)


def say_json(value: Any) -> None:
    """Print JSON; numbers that are not finite become null."""
    from fedblend.runs.run_folder import json_text

    typer.echo(json_text(value))


def note(text: str) -> None:
    """Print one line on stderr, whatever its width."""
    console(stderr=True).print(text, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    note(f"warning: {text}")


def complain(text: str) -> int:
    """Print an error of the input on stderr; returns the exit code."""
    note(f"error: {' '.join(text.split())}")
    return BAD_INPUT


def table(*headings: str, right: int | None = None) -> Any:
    """An empty table whose first column is never broken.

    Args:
        *headings: of the columns.
        right: the first column that is aligned to the right.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        justify = "left" if right is None or number < right else "right"
        made.add_column(heading, no_wrap=number == 0, justify=justify)
    return made


def load(file: Path, settings: list[str] | None) -> "Config":
    """The configuration of a file with ``--set KEY=VALUE``, about to be computed."""
    compile_cache()
    from fedblend.config.config import load

    return load(file, settings or [])


@contextlib.contextmanager
def interruptible(text: str = "interrupted") -> Iterator[None]:
    """End at Ctrl-C with this text and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        note(text)
        raise typer.Exit(INTERRUPTED) from None


@contextlib.contextmanager
def lasting_interrupt() -> Iterator[Callable[[], None]]:
    """Remember a Ctrl-C that falls into a callback of JAX, where it would be lost.

    Yields a function, to be called after every block, that raises it again.
    """
    seen = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal seen
        seen = True
        signal.default_int_handler(number, frame)

    def stop() -> None:
        if seen:
            raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


STAGES = {
    "trial": ", training alone, how long",
    "local": ", training alone, to compare",
    "federated": "",
}


@contextlib.contextmanager
def watch_steps() -> Iterator[Callable[[str, "Step"], None]]:
    """What to call after every step of a run inside, with the run's name.

    It shows progress in a terminal, and raises a Ctrl-C that would be lost.
    """
    from rich import progress

    shown = console(stderr=True)
    columns = *progress.Progress.get_default_columns(), progress.MofNCompleteColumn()
    bar = progress.Progress(
        *columns, console=shown, transient=True, disable=not shown.is_terminal
    )
    with lasting_interrupt() as stop, bar:
        task = bar.add_task("loading, compiling, choosing rates", total=None)

        def watch(name: str, step: "Step") -> None:
            stop()
            told = f"{name}{STAGES[step.stage]}"
            bar.update(task, description=told, completed=step.round, total=step.rounds)

        yield watch


@contextlib.contextmanager
def errors_of(file: Path, interrupted: str = "interrupted") -> Iterator[None]:
    """``interruptible``, with the file named in the errors of its configuration."""
    from fedblend.errors import ConfigError

    with interruptible(interrupted):
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None


def run_again(file: Path, settings: list[str] | None) -> list[str]:
    """The words of a command that runs a file with the same settings."""
    words = [word for setting in settings or [] for word in ("--set", setting)]
    return ["fedblend", "run", str(file), *words]


def compile_cache() -> None:
    """Store what JAX compiles in the user's cache, for the next run."""
    from fedblend.simulation import compile

    compile.compile_cache()

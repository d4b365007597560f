# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend run``: a configuration, from file to results."""

import contextlib
import os
import re
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedblend.cli import screen

if TYPE_CHECKING:
    from fedblend.config.config import Config
    from fedblend.experiments.run import Step


class Format(StrEnum):
    """How results are printed."""

    table = "table"
    json = "json"


def run(
    file: Annotated[Path, typer.Argument(help="The TOML file of the run.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the file."),
    ] = None,
    seed: Annotated[
        list[str] | None,
        typer.Option(metavar="N...", help="One seed, or several run side by side."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of results; runs/NAME by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the run was interrupted.")
    ] = False,
    format: Annotated[
        Format, typer.Option(help="json prints the summary and nothing else.")
    ] = Format.table,
) -> None:
    """Run what a TOML file describes, and write results to a folder.

    [bold]Examples[/bold]

    fedblend run first.toml

    fedblend run first.toml --set algorithm.rate=0.05 --set run.rounds=50

    fedblend run first.toml --seed 1 2 3 --out runs/seeds

    fedblend run first.toml --out runs/seeds --seed 1 2 3 --resume
    """
    compile_cache()
    from fedblend.config.config import ConfigError, load
    from fedblend.experiments.run import run_config

    config = load(file, [*(sets or []), *_seed_setting(seed or [])])
    out = out or results_folder(config)
    try:
        with lasting_interrupt() as stop, progress(config) as report:

            def on_step(step: "Step") -> None:
                stop()
                report(step)

            summary = run_config(
                config,
                out,
                resume=resume,
                on_step=on_step,
                on_warning=lambda text: screen.note(f"warning: {text}"),
            )
    except KeyboardInterrupt:
        same = f"--out {shlex.quote(str(out))} --resume"
        screen.note(f"interrupted; the same command with {same} goes on")
        raise typer.Exit(screen.INTERRUPTED) from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    show_summary(out, summary, format)


def results_folder(config: "Config") -> Path:
    """Where results go if no other place is named."""
    return Path("runs") / re.sub(r"[^\w.-]+", "-", config.name)


def show_summary(
    out: Path, summary: dict[str, Any], format: Format = Format.table
) -> None:
    """Print how a run ended."""
    from fedblend.experiments.run_folder import Folder, as_json, read_rows

    if format is Format.json:
        typer.echo(as_json(summary))
        return
    from fedblend.report.terminal import show

    console = screen.console()
    show(read_rows(Folder(out)), summary["runs"], console, summary)
    screen.say_privacy(console, summary)
    console.print(f"results: {out}", markup=False, soft_wrap=True)


def _seed_setting(seeds: list[str]) -> list[str]:
    """``--seed`` as a setting of ``run.seed``."""
    numbers = [word.strip() for text in seeds for word in text.split(",")]
    for word in numbers:
        if not word.isdecimal():
            raise typer.BadParameter(f"--seed: {word!r} is not a whole number from 0")
    if not numbers:
        return []
    value = numbers[0] if len(numbers) == 1 else f"[{', '.join(map(_plain, numbers))}]"
    return [f"run.seed={_plain(value) if len(numbers) == 1 else value}"]


def _plain(word: str) -> str:
    return str(int(word[:20]))


def joined_seeds(arguments: list[str]) -> list[str]:
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


def compile_cache() -> None:
    """Keep what JAX compiles in the user's cache, for the next run."""
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore
        return
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "fedblend" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def lasting_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C that is not lost where it falls into a callback of JAX.

    Exceptions cannot leave such a callback; the function that this hands out, called
    after every block, raises what was lost.
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


@contextlib.contextmanager
def progress(config: "Config") -> Iterator[Callable[["Step"], None]]:
    """A bar for each stage with rounds per second; nothing without a terminal."""
    console = screen.console(stderr=True)
    if not console.is_terminal:
        yield lambda step: None
        return
    from rich import progress as bars

    class Speed(bars.ProgressColumn):
        def render(self, task: bars.Task) -> Any:
            return f"{task.speed:.1f} rounds/s" if task.speed else ""

    names = {
        "trial": "local only, how long",
        "local": "local only, to compare",
        "federated": getattr(config.algorithm, "name", ""),
    }
    with bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        Speed(),
        bars.TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        waiting = bar.add_task("loading and compiling", total=None)
        tasks: dict[str, Any] = {}

        def report(step: "Step") -> None:
            bar.update(waiting, visible=step.round == 0 and step.rounds > 0)
            if step.stage not in tasks:
                tasks[step.stage] = bar.add_task(names[step.stage], total=step.rounds)
            bar.update(tasks[step.stage], completed=step.round, total=step.rounds)

        yield report

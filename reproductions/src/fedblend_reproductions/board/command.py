# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend board``: rerun published tables under two protocols.

``fedblend.cli`` loads this module by its entry point. Nothing of ``fedblend.cli`` is
imported here: the command also runs where its requirements are missing, on a machine
with a GPU and JAX alone.
"""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

_SILOS = "silos"
"""The board of tables, which has a command of its own."""


def board(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK", help="Tasks; all if none. silos is a board of its own."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas, or tables of silos; all if none."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of each run; those of the published table if none."),
    ] = None,
    patience: Annotated[
        int,
        typer.Option(
            min=0,
            help="Stop a run where no round was better for so many; 0 for never.",
        ),
    ] = 0,
    budget: Annotated[
        float | None, typer.Option(help="Seconds after which to stop; resumable.")
    ] = None,
    share: Annotated[
        str,
        typer.Option(
            metavar="K/N", help="Run the K-th of every N rows, for N processes."
        ),
    ] = "1/1",
    honest_only: Annotated[
        bool,
        typer.Option(
            "--honest",
            help="The honest protocol alone: no runs of the published rate where "
            "another one is chosen.",
        ),
    ] = False,
    tables: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the tables of silos; tables in the data home if none."
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time budget of each table of silos.")
    ] = 3.0,
    check_only: Annotated[
        bool, typer.Option("--check", help="Run nothing; check all cells in OUT.")
    ] = False,
    page_only: Annotated[
        bool, typer.Option("--page", help="Run nothing; write the page of OUT's cells.")
    ] = False,
    list_only: Annotated[
        bool, typer.Option("--list", help="Run nothing; list tasks and methods.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of board.md and of the cells.")] = (
        Path("reproduced")
    ),
) -> None:
    """Rerun published tables of personalized methods, under their protocol and ours.

    Every cell (task, method, rate, seed) is a JSON file in OUT/board; finished cells
    are skipped, and a run that was stopped goes on. OUT/board.md shows all of them
    beside the published numbers.

    [bold]Examples[/bold]

    fedblend board --list

    fedblend board fashion_classes --only fedavg,finetune,apfl --rounds 100

    fedblend board --budget 900 --out docs/results

    fedblend board --check --out docs/results

    fedblend board silos --only heart,taxi --out docs/results
    """
    if tasks and _SILOS in tasks:
        if len(tasks) > 1:
            raise typer.BadParameter(f"TASK: {_SILOS} is a board of its own")
        _silos(only, tables, minutes, budget, out, (check_only, page_only, list_only))
        return
    _cache_programs()
    from fedblend_reproductions.board import cells, page, runs, scafflix
    from fedblend_reproductions.board.methods import METHODS
    from fedblend_reproductions.board.tasks import TASKS

    if list_only:
        typer.echo(f"tasks: {', '.join([*TASKS, scafflix.NAME])}")
        typer.echo(f"methods: {', '.join(METHODS)}")
        return
    every = {**TASKS, scafflix.NAME: None}
    wanted = [_known("TASK", name, every) for name in tasks or every]
    chosen = [TASKS[name] for name in wanted if name in TASKS]
    names = [name.strip() for name in only.split(",")] if only else list(METHODS)
    methods = [METHODS[_known("--only", name, METHODS)] for name in names]
    numbers = _numbers(seeds)
    if rounds is not None and rounds < 1:
        raise typer.BadParameter(f"--rounds: {rounds} is not 1 or more")
    first, step = _share(share)
    folder, target = out / "board", out / "board.md"
    if check_only:
        _check(folder)
        return
    deadline = float("inf") if budget is None else time.monotonic() + budget
    plan = runs.Plan(folder, rounds, numbers, not honest_only, patience, deadline)
    rows = [(task, method) for task in chosen for method in methods]
    pairs = [pair for pair in rows if pair[1].name not in pair[0].skips][first::step]
    data, stopped = {}, False
    for task, method in [] if page_only else pairs:
        if task.name not in data:
            data = {task.name: task.data()}  # one task's rows at a time
        typer.echo(f"{task.name}: {method.heading} ...", err=True)
        begun = time.monotonic()
        try:
            runs.measure_row(task, method, data[task.name], plan)
        except runs.OutOfTime:
            stopped = True
            break
        typer.echo(f"  {time.monotonic() - begun:.1f} s", err=True)
    if scafflix.NAME in wanted and only is None and first == 0 and not page_only:
        for name in scafflix.NAMES:
            if time.monotonic() <= deadline:
                typer.echo(f"{scafflix.NAME}: {name} ...", err=True)
                scafflix.measure(name, folder)
    found = [cell for _, cell in cells.all_cells(folder)]
    if page_only and not folder.exists():
        raise typer.BadParameter(f"--page: {folder} holds no cell of the board")
    target.parent.mkdir(parents=True, exist_ok=True)
    guide = target.read_text() if target.exists() else ""
    target.write_text(page.page(found, scafflix.section(folder), guide))
    if stopped:
        typer.echo("the budget is spent; the same command goes on from here", err=True)
    typer.echo(f"page: {target}")


def _silos(
    only: str | None,
    tables: Path | None,
    minutes: float,
    budget: float | None,
    out: Path,
    asked: tuple[bool, bool, bool],
) -> None:
    """The cross-silo board, whose comparisons need all of fedblend's command line."""
    from fedblend_reproductions.silos import command
    from fedblend_reproductions.silos.tables import TABLES

    check_only, page_only, list_only = asked
    if list_only:
        for name, known in TABLES.items():
            typer.echo(f"{name}: {known.title}; {known.source}; {known.license}")
    elif check_only:
        typer.echo(f"{command.check(out)} tables are those of the page")
    elif page_only:
        command.write_page(out)
    else:
        names = [name.strip() for name in only.split(",")] if only else list(TABLES)
        names = [_known("--only", name, TABLES) for name in names]
        deadline = float("inf") if budget is None else time.monotonic() + budget
        command.run(
            names,
            out,
            tables,
            minutes,
            deadline,
            lambda line: typer.echo(line, err=True),
        )


def _known(option: str, name: str, known: dict) -> str:
    if name not in known:
        raise typer.BadParameter(f"{option}: {name!r} is none of {', '.join(known)}")
    return name


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"--seeds: {text!r} is no list of numbers, as 0,1,2")
    return [int(part) for part in parts]


def _share(text: str) -> tuple[int, int]:
    """The first row and the step of one of several processes."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise typer.BadParameter(f"--share: {text!r} is not K/N, as 1/3, with K <= N")
    return int(number) - 1, int(of)


def _check(folder: Path) -> None:
    from fedblend_reproductions.board import cells, scafflix

    stored = list(cells.all_cells(folder))
    problems = [line for path, cell in stored for line in cells.check(path, cell)]
    figure = sorted((folder / scafflix.NAME).glob("*.json"))
    problems += [line for path in figure for line in scafflix.check(path)]
    for line in problems[1:]:
        typer.echo(f"error: {line}", err=True)
    if problems:
        raise typer.BadParameter(problems[0])
    typer.echo(f"{len(stored) + len(figure)} cells are those of the board")


def _cache_programs() -> None:
    """Store what JAX compiles: all simulations of a row are the same program."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "fedblend" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

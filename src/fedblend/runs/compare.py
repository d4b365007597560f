# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Run configurations on the same clients and splits, and compare them.

``compare`` takes configurations, ``sweep`` one configuration at every point of a grid.
Every one becomes an ordinary run in ``OUT/runs/NAME``; the tables of their differences
are in ``OUT``, see ``comparison``. Training alone is computed once for all runs that
share it. Points of equal shapes run as one compiled program, see ``side_by_side``; its
numbers equal those of single runs but for rounding.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config import toml
from fedblend.config.config import Config, dump, load
from fedblend.config.sweep import Point, grid, parse, programs
from fedblend.errors import ConfigError, RunError, UserError
from fedblend.runs import run_folder
from fedblend.runs.comparison import Comparison, TargetValue, write
from fedblend.runs.paired import check_same_data, data_keys
from fedblend.runs.run import Step, run_config, share_alone, work_alone
from fedblend.runs.run_folder import Folder
from fedblend.runs.side_by_side import NotTogether, run_together
from fedblend.simulation.run import Run

Entry = str | Path | Config | Run
"""A configuration, its file, the folder of a finished run, or a run of ``simulate``."""
OnStep = Callable[[str, Step], None]
"""Called with the name of a run and its progress."""
OnWarning = Callable[[str], None]
PROGRAMS = "programs"
"""The folder of checkpoints, while a sweep runs."""


class Sweep(NamedTuple):
    """A finished sweep."""

    points: Sequence[Point]
    comparison: Comparison
    chosen: str | None
    """The run that is best on validation rows, None where there are none."""
    programs: int
    """How many programs were compiled and run."""


def compare(
    entries: Sequence[Entry] | Mapping[str, Entry],
    out: str | Path = "runs/comparison",
    *,
    seeds: int | None = None,
    resume: bool = False,
    metrics: Sequence[str] | None = None,
    target: str | None = None,
    sets: Iterable[str] = (),
    on_step: OnStep = lambda name, step: None,
    on_warning: OnWarning = lambda line: None,
) -> Comparison:
    """Run configurations on the same clients and splits, and compare them.

    Args:
        entries: configurations, TOML files, folders of finished runs, or runs of
            ``simulate``, whose folders are written; by name, or in a list.
        out: the folder of the comparison; it must not hold one yet, unless ``resume``,
            or no configuration is to run.
        seeds: how many seeds to run, from the configuration's own on.
        resume: continue a comparison that was interrupted.
        metrics: what to test differences of; the main metric if None.
        target: such as "accuracy=0.9": how many rounds and bits it takes to get there.
        sets: settings ``key=value`` for every configuration.
        on_step: called after every block of rounds of a run.
        on_warning: called with each warning, one line.

    Raises:
        InputError: one line: the configurations do not go together, or cannot run.
    """
    out = Path(out)
    wanted = None if target is None else TargetValue.parse(target)
    found = read_entries(entries, seeds, tuple(sets))
    configs = {name: of for name, of in found.items() if isinstance(of, Config)}
    runs = {name: of for name, of in found.items() if isinstance(of, Run)}
    check_same_data({name: (data_keys(of), {}) for name, of in configs.items()})
    if configs or not runs:
        _check_free(out, "comparison", resume)
    folders = {
        name: of if isinstance(of, Path) else out / "runs" / safe_name(name)
        for name, of in found.items()
    }
    if len(set(folders.values())) < len(folders):
        raise RunError(f"compare: {', '.join(folders)}: two runs have the same folder")
    for name, run in runs.items():
        run.save(folders[name], name)
    for name in configs:
        _run(name, configs, folders, on_step, on_warning)
    out.mkdir(parents=True, exist_ok=True)
    return write(folders, out, metrics=metrics, target=wanted)


def sweep(
    config: str | Path | Config,
    over: Mapping[str, Sequence[Any]] | Iterable[str],
    out: str | Path = "runs/sweep",
    *,
    seeds: int | None = None,
    resume: bool = False,
    metrics: Sequence[str] | None = None,
    target: str | None = None,
    sets: Iterable[str] = (),
    on_step: OnStep = lambda name, step: None,
    on_warning: OnWarning = lambda line: None,
) -> Sweep:
    """Run a configuration at every point of a grid, and compare the points.

    Args:
        config: a configuration, or its TOML file.
        over: the values of each key, or texts such as "algorithm.alpha=0:1:0.1".
        out: the folder of the sweep; it must not hold one yet, unless ``resume``.
        seeds: how many seeds to run, from the configuration's own on.
        resume: continue a sweep that was interrupted.
        metrics: what to test differences of; the main metric if None.
        target: such as "accuracy=0.9": how many rounds and bits it takes to get there.
        sets: settings ``key=value`` of the configuration.
        on_step: called after every block of rounds.
        on_warning: called with each warning, one line.

    Raises:
        InputError: one line: the grid is not one, or a configuration cannot run.
    """
    out = Path(out)
    wanted = None if target is None else TargetValue.parse(target)
    points = read_points(config, over, seeds, sets)
    _check_free(out, "sweep", resume)
    folders = {point.name: out / "runs" / safe_name(point.name) for point in points}
    for point in points:
        there = Folder(folders[point.name]).config
        if there.exists() and there.read_text() != dump(point.config):
            raise RunError(f"{there.parent}: holds a run of another config")
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    for number, program in enumerate(programs(points)):
        place = Folder(out / PROGRAMS / str(number))
        count += _run_points(program, folders, place, on_step, on_warning)
    shutil.rmtree(out / PROGRAMS, ignore_errors=True)
    keys = {point.name: point.values for point in points}
    made = write(folders, out, keys=keys, metrics=metrics, target=wanted)
    return Sweep(points, made, best_on_validation(made), count)


def _check_free(out: Path, what: str, resume: bool) -> None:
    if (out / "runs").exists() and not resume:
        raise RunError(
            f"{out}: holds a {what} already; --resume continues it, --out names "
            "another folder"
        )


def _run(
    name: str,
    configs: Mapping[str, Config],
    folders: Mapping[str, Path],
    on_step: OnStep,
    on_warning: OnWarning,
) -> None:
    """Run one of these configurations, with training alone from a finished run."""
    config, folder = configs[name], Folder(folders[name])
    work = work_alone(config)
    alike = [
        Folder(folders[other])
        for other, of in configs.items()
        if other != name and work and work_alone(of) == work
    ]
    for other in alike:
        if other.summary.exists() and share_alone(other, config, folder):
            break
    run_config(
        config,
        folder.path,
        resume=True,
        on_step=lambda step: on_step(name, step),
        on_warning=lambda line: on_warning(f"{name}: {line}"),
    )


def _run_points(
    points: Sequence[Point],
    folders: Mapping[str, Path],
    place: Folder,
    on_step: OnStep,
    on_warning: OnWarning,
) -> int:
    """Run points as one program, or one after another; how many programs ran."""
    mine = {point.name: Folder(folders[point.name]) for point in points}
    if all(folder.summary.exists() for folder in mine.values()):
        return 0
    if len(points) > 1:
        name = f"{points[0].name} to {points[-1].name}"
        try:
            run_together(
                points,
                mine,
                place,
                on_step=lambda step: on_step(name, step),
                on_warning=lambda run, line: on_warning(f"{run}: {line}"),
            )
        except NotTogether:
            pass
        else:
            return 1
    configs = {point.name: point.config for point in points}
    for name in configs:
        _run(name, configs, folders, on_step, on_warning)
    return len(points)


def read_entries(
    entries: Sequence[Entry] | Mapping[str, Entry],
    seeds: int | None = None,
    sets: Sequence[str] = (),
) -> dict[str, Path | Config | Run]:
    """What to run, the folders of finished runs, and runs, by name."""
    if not entries:
        raise RunError(
            "compare: nothing to compare; name configurations or run folders"
        )
    if isinstance(entries, Mapping):
        return {str(name): _read(of, seeds, sets)[0] for name, of in entries.items()}
    found: dict[str, Path | Config | Run] = {}
    known = [_read(entry, seeds, sets) for entry in entries]
    firsts = [name for _, name, _ in known]
    for entry, (value, first, other) in zip(entries, known, strict=True):
        name = first if firsts.count(first) == 1 else other
        if name in found:
            kinds = {Config: "a configuration", Run: "compare takes runs by name, too"}
            where = kinds.get(type(entry), entry)
            raise ConfigError(
                f"{where}: name: {name!r} is the name of another run of this comparison"
            )
        found[name] = value
    return found


def _read(
    entry: Entry, seeds: int | None, sets: Sequence[str]
) -> tuple[Path | Config | Run, str, str]:
    """What an entry stands for, its name, and another one where that is taken."""
    if isinstance(entry, Run):
        return entry, entry.name, entry.name
    if isinstance(entry, Config):
        name = safe_name(entry.name)
        return set_seeds(entry, seeds), name, name
    if not isinstance(entry, str | Path):
        allowed = "a configuration, a folder or a run of simulate"
        raise UserError("compare", entry, allowed)
    path = Path(entry)
    if path.is_dir():
        summary = run_folder.read_summary(Folder(path))
        return path, path.resolve().name, safe_name(str(summary.get("name", "")))
    config = set_seeds(load(path, sets), seeds)
    return config, safe_name(config.name), safe_name(path.stem)


def safe_name(name: str) -> str:
    """The name of a folder.

    >>> safe_name("my run: 1")
    'my-run-1'
    """
    kept = [sign if sign.isalnum() or sign in "._=-" else " " for sign in name]
    return "-".join("".join(kept).split()).strip(".") or "run"


def set_seeds(config: Config, seeds: int | None) -> Config:
    """The configuration with so many seeds, from its own (the first) on."""
    if seeds is None:
        return config
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is not 1 or more")
    first = run_folder.seeds_of(config)[0]
    chosen: Any = first if seeds == 1 else list(range(first, first + seeds))
    run = config.run.model_copy(update={"seed": chosen})
    return config.model_copy(update={"run": run})


def read_points(
    config: str | Path | Config,
    over: Mapping[str, Sequence[Any]] | Iterable[str],
    seeds: int | None,
    sets: Iterable[str] = (),
) -> list[Point]:
    """The configurations of a sweep."""
    if isinstance(config, Config):
        where, folder = "a config", Path()
        content = toml.parse(dump(config), where)
    else:
        path = Path(config)
        content, where, folder = toml.read(path), str(path), path.parent
    for setting in sets:
        toml.put(content, setting)
    if not isinstance(over, Mapping):
        parsed = [parse(text) for text in over]
        if len({key for key, _ in parsed}) < len(parsed):
            raise ConfigError("--over: the same key twice; give all its values at once")
        over = dict(parsed)
    points = grid(content, over, where, folder)
    return [point._replace(config=set_seeds(point.config, seeds)) for point in points]


def best_on_validation(made: Comparison) -> str | None:
    """The run whose personal models are best on validation rows."""
    metric = made.metrics[0] if made.metrics else ""
    found = {
        name: made.means(name, "validation", "personal", metric)
        for name in made.folders
    }
    means = {
        name: float(np.mean(values))
        for name, values in found.items()
        if values and None not in values
    }
    if not means:
        return None
    return (max if made.higher_is_better(metric) else min)(means, key=means.__getitem__)

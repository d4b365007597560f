# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Sweep a configuration over values of its keys, and compare the values.

Every value becomes an ordinary run in ``OUT/runs/KEY=VALUE``, with the tables of
``compare`` beside them. What has equal shapes runs as one compiled program, see
``side_by_side``; its numbers equal those of single runs but for rounding.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.config import toml
from fedblend.config.config import Config, dump
from fedblend.config.sweep import Point, grid, parse, programs
from fedblend.errors import ConfigError, RunError
from fedblend.runs.compare import OnStep, safe_name, share_alone, with_seeds
from fedblend.runs.comparison import Comparison, write
from fedblend.runs.result_tables import Target
from fedblend.runs.run import run_config
from fedblend.runs.run_folder import Folder
from fedblend.runs.side_by_side import NotTogether, run_together

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


def sweep(
    config: str | Path | Config,
    over: Mapping[str, Sequence[Any]] | Iterable[str],
    out: str | Path = "runs/sweep",
    *,
    seeds: int | None = None,
    resume: bool = False,
    metrics: Sequence[str] | None = None,
    target: str | None = None,
    figures: bool = False,
    sets: Iterable[str] = (),
    on_step: OnStep = lambda name, step: None,
    on_warning: Callable[[str], None] = lambda line: None,
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
        figures: draw figures for a paper, as PDF.
        sets: settings ``key=value`` of the configuration.
        on_step: called after every block of rounds.
        on_warning: called with each warning, one line.

    Raises:
        InputError: one line: the grid is not one, or a configuration cannot run.
    """
    out = Path(out)
    wanted = None if target is None else Target.parse(target)
    points = read_points(config, over, seeds, sets)
    if (out / "runs").exists() and not resume:
        raise RunError(
            f"{out}: holds a sweep already; --resume continues it, --out names another "
            "folder"
        )
    folders = {
        point.name: Folder(out / "runs" / safe_name(point.name)) for point in points
    }
    _check_owners(points, folders)
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    for number, program in enumerate(programs(points)):
        place = Folder(out / PROGRAMS / str(number))
        count += _run(program, folders, place, out, on_step, on_warning)
    shutil.rmtree(out / PROGRAMS, ignore_errors=True)
    paths = {name: folder.path for name, folder in folders.items()}
    keys = {point.name: point.values for point in points}
    made = write(paths, out, keys=keys, metrics=metrics, target=wanted, figures=figures)
    if figures:
        _draw(points, made, out)
    return Sweep(points, made, best_on_validation(made), count)


def read_points(
    config: str | Path | Config,
    over: Mapping[str, Sequence[Any]] | Iterable[str],
    seeds: int | None,
    sets: Iterable[str] = (),
) -> list[Point]:
    """The configurations of a sweep."""
    if isinstance(config, Config):
        content, where, folder = (
            toml.parse(dump(config), "a config"),
            "a config",
            Path(),
        )
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
    return [point._replace(config=with_seeds(point.config, seeds)) for point in points]


def _check_owners(points: Sequence[Point], folders: Mapping[str, Folder]) -> None:
    """Refuse to continue another sweep."""
    for point in points:
        folder = folders[point.name]
        if folder.config.exists() and folder.config.read_text() != dump(point.config):
            raise RunError(f"{folder.path}: holds a run of another config")


def _run(
    points: Sequence[Point],
    folders: Mapping[str, Folder],
    place: Folder,
    out: Path,
    on_step: OnStep,
    on_warning: Callable[[str], None],
) -> int:
    """Run points as one program, or one after another; how many programs ran."""
    if all(folders[point.name].summary.exists() for point in points):
        return 0
    if len(points) > 1:
        name = f"{points[0].name} to {points[-1].name}"
        try:
            run_together(
                points,
                folders,
                place,
                on_step=lambda step: on_step(name, step),
                on_warning=lambda run, line: on_warning(f"{run}: {line}"),
            )
        except NotTogether:
            pass
        else:
            return 1
    every = {folders[point.name].path.name: point.config for point in points}
    for point in points:
        path = folders[point.name].path
        share_alone(point.config, path, every, out)
        run_config(
            point.config,
            path,
            resume=True,
            on_step=lambda step, name=point.name: on_step(name, step),
            on_warning=lambda line, name=point.name: on_warning(f"{name}: {line}"),
        )
    return len(points)


def best_on_validation(made: Comparison) -> str | None:
    """The run whose personal models are best on validation rows."""
    metric = made.metrics[0] if made.metrics else ""
    means = {}
    for name in made.folders:
        found = [
            row["mean"]
            for row in made.results
            if (row["run"], row["split"], row["model"], row["metric"])
            == (name, "validation", "personal", metric)
        ]
        if found and None not in found:
            means[name] = float(np.mean(found))
    if not means:
        return None
    return (max if made.higher_is_better(metric) else min)(means, key=means.__getitem__)


def _draw(points: Sequence[Point], made: Comparison, out: Path) -> None:
    """The metric by the values of the key, if there is one key with numbers."""
    from fedblend.report.paper_figures import draw_sweep

    (key, *more) = points[0].values
    values = [point.values[key] for point in points]
    if more or not all(isinstance(of, int | float) for of in values):
        return
    metric = made.metrics[0]
    models: dict[str, np.ndarray] = {}
    split = made.split
    for model in ("personal", "shared", "local"):
        found = [
            [
                row["mean"]
                for row in made.results
                if (row["run"], row["split"], row["model"], row["metric"])
                == (point.name, split, model, metric)
            ]
            for point in points
        ]
        if all(found):
            label = {"local": "training alone"}.get(model, f"{model} model")
            models[label] = np.array(found, float)
    path = out / "figures" / "sweep.pdf"
    draw_sweep(values, models, key, f"{split} {metric}", path)

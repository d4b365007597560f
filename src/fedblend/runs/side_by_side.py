# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Several configurations of equal shapes as one compiled program.

All values of a sweep and all seeds are replicas of one simulation, and every value gets
the folder of an ordinary run. Training alone runs before it: once where it does not
depend on the swept keys, and otherwise once for each value.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from fedblend.config.build import Built, build
from fedblend.config.config import dump, rename_errors
from fedblend.config.sweep import Point, join_points
from fedblend.errors import CheckpointError
from fedblend.metrics import main_first
from fedblend.runs import results, run_folder
from fedblend.runs.run import TABLES, Step, advance, open_folder, stages, work_alone
from fedblend.runs.run_folder import Folder, seeds_of
from fedblend.simulation import checkpoint
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import set_up
from fedblend.trees import precision

MOST_ENTRIES = 2**28
"""Entries of all clients' models in one program, over all replicas."""

OnStep = Callable[[Step], None]


class NotTogether(Exception):
    """Every value is a program of its own: the algorithm decides by it, or it stops."""


def run_together(
    points: Sequence[Point],
    folders: Mapping[str, Folder],
    place: Folder,
    *,
    on_step: OnStep = lambda step: None,
    on_warning: Callable[[str, str], None] = lambda name, line: None,
) -> None:
    """Run points as one program, and write the folder of each.

    Args:
        points: their configurations differ in real numbers of the algorithm only.
        folders: the folder of each run, by name.
        place: where checkpoints are, while it runs.
        on_step: called after every block of rounds.
        on_warning: called with the name of a run, or "all values", and a warning.

    Raises:
        NotTogether: before anything is computed.
    """
    config = points[0].config
    if config.run.until is not None:
        raise NotTogether("run.until: every value stops in its own round")
    with precision(config.run.precision):
        built = build(config)
        for warning in built.warnings:
            on_warning("all values", warning)
        metric = main_first(built.measures)[0]
        most = _most_points(built)
        parts = [points[at : at + most] for at in range(0, len(points), most)]
        first = _joint(parts[0], built)
        alone = _alone(points, built, metric, place, on_step)
        for number, part in enumerate(parts):
            whole = _joint(part, built) if number else first
            inside = Folder(place.path / f"part{number}")
            _advance(whole, part, inside, on_step)
            for replica, point in enumerate(part):
                if not folders[point.name].summary.exists():
                    local = alone[number * most + replica]
                    run = whole.select_replicas(_places(point, replica), local)
                    _write(folders[point.name], point, built, run, on_warning)


def _most_points(built: Built) -> int:
    """How many points one program may have, so that their models fit in memory."""
    each = built.parameters * built.federated_data.clients
    each *= max(int(built.key.size), 1)
    return max(MOST_ENTRIES // max(each, 1), 1)


def _places(point: Point, number: int) -> slice | int:
    """The replicas of a point in its program."""
    if isinstance(point.config.run.seed, int):
        return number
    seeds = len(point.config.run.seed)
    return slice(number * seeds, (number + 1) * seeds)


def _joint(points: Sequence[Point], built: Built) -> Run:
    """All points as replicas of one run, before its first round."""
    found = join_points(points, built)
    key, federations = built.key, list(built.federations)
    if key.ndim:
        key = jnp.concatenate([key] * len(points))
        federations = federations * (len(points) if len(federations) > 1 else 1)
    spec = dataclasses.replace(
        built.spec,
        algorithm=found.algorithm,
        federated_data=federations,
        key=key,
        over=found.over,
        local=None,
    )
    try:
        with rename_errors(**TABLES):
            return set_up(spec)
    except jax.errors.JAXTypeError as error:
        raise NotTogether(str(error)) from error


def _alone(
    points: Sequence[Point], built: Built, metric: str, place: Folder, on_step: OnStep
) -> list[Run | None]:
    """Training alone to compare each point with; equal work is done once."""
    done: dict[str, Run | None] = {}
    found = []
    for number, point in enumerate(points):
        work = repr(work_alone(point.config))
        if work not in done:
            inside = Folder(place.path / f"alone{len(done)}")
            own = built if not number else build(point.config)
            done[work] = _train_alone(point, own, metric, inside, on_step)
        found.append(done[work])
    return found


def _train_alone(
    point: Point, built: Built, metric: str, place: Folder, on_step: OnStep
) -> Run | None:
    runs = stages(point.config, built, place, metric)
    place.path.mkdir(parents=True, exist_ok=True)
    for stage in runs:
        if stage != "federated":
            advance(place, point.config, stage, runs, metric, on_step)
    return runs.get("local")


def _advance(run: Run, points: Sequence[Point], place: Folder, on_step: OnStep) -> None:
    """Run the program to its end, from its checkpoint if there is one."""
    place.path.mkdir(parents=True, exist_ok=True)
    path = place.checkpoint("federated")
    configs = json.dumps([dump(point.config) for point in points])
    if path.exists():
        if checkpoint.read_about(path).get("configs") != configs:
            raise CheckpointError(f"checkpoint {path}: belongs to another sweep")
        checkpoint.restore(path, run)
    for _ in run:
        checkpoint.save(path, run, {"configs": configs})
        on_step(Step("federated", run.round, run.rounds))


def _write(
    folder: Folder,
    point: Point,
    built: Built,
    run: Run,
    on_warning: Callable[[str, str], None],
) -> None:
    """Write the folder of an ordinary run."""
    open_folder(folder, point.config, built)
    run_folder.write_metrics(folder, run, seeds_of(point.config))
    results.write_summary(
        folder,
        point.config,
        built,
        run,
        {},
        lambda line: on_warning(point.name, line),
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The runs that ``fedblend auto`` keeps: the methods of the verdict, in rounds."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from threadpoolctl import threadpool_limits

from fedblend.config.build import Built, build
from fedblend.config.config import Config
from fedblend.config.sweep import Point, join_points
from fedblend.models.feedforward import Affine
from fedblend.runs import run_folder
from fedblend.runs.auto.additive import add_bins
from fedblend.runs.auto.candidates import ALONE, BY_NAME
from fedblend.runs.auto.letters import count_entries
from fedblend.runs.auto.linear import shared_part
from fedblend.runs.auto.tuning import models, scale_rows
from fedblend.runs.run import run_built
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import set_up

FAR = {"linear": 0.01, "additive": 0.01, "tabular": 0.05}
"""Part of its score by which a kept run may differ from the models of the verdict, by
the model: networks have other first weights."""

SPEED, START = 1e9, 5.0
"""Products per second of a processor core, and seconds in which a run is compiled."""
COSTLY = 1e9
"""Products of a split from which a program without own parts is worth compiling."""


def count_affordable(
    configs: Sequence[Config], seen: Mapping[str, Any], left: float
) -> int:
    """Splits that all kept runs have time for.

    Newton's method solves systems of the size of a model; what other methods compute is
    in proportion to rows.

    Args:
        configs: of the runs.
        seen: clients, rows and coefficients of a linear model.
        left: seconds.
    """
    products = 0.0
    for config in configs:
        algorithm: Any = config.algorithm
        each = seen["rows"] * seen["entries"]
        if algorithm.name == "hierarchical":
            own = algorithm.level or algorithm.slopes
            steps = algorithm.steps + 2 if own else 0
            solved = steps * seen["clients"] * seen["entries"] ** 3
            each = each * seen["entries"] + solved
        products += config.run.rounds * each
    return max(0, int((left - START * len(configs)) * SPEED / products))


def keep_run(
    name: str,
    config: Config,
    metric: str,
    folder: Path,
    known: dict[str, Any],
    done: dict[str, Run],
    stop: Callable[[], None],
) -> str | None:
    """Run a method in rounds; a warning where it did not reach the verdict's models.

    Args:
        name: of the method.
        config: of its run.
        metric: that decides.
        folder: of the run.
        known: what is known of the method; the bits that a client sends and receives,
            mean over splits, are added.
        done: the runs so far by what computes them; this one is added. The first is
            that of training alone, with which the others are compared.
        stop: raises if the user asked to stop.
    """
    built, algorithm, program = build(config), cast(Any, config.algorithm), name
    clients, entries = built.federated_data.clients, count_entries(built.task)
    if algorithm.name == "hierarchical" and algorithm.share:
        solved = config.run.rounds * clients * entries**3
        # Own parts that are all zero are left out of a program of its own.
        if algorithm.level or algorithm.slopes or solved < COSTLY:
            built, program = _take_variances(config, built), config.model.name
    summary, run = run_built(
        config,
        built,
        folder,
        metric,
        local=done.get(ALONE),
        like=done.get(program),
        on_step=lambda step: stop(),
    )
    done[program] = run
    runs = summary["runs"]
    sent = sum(run["bits"]["up"] + run["bits"]["down"] for run in runs)
    known["bits_per_client"] = sent / len(runs) / clients
    tested = float(np.mean(known["by_split"][: len(runs)]))
    return distance_warning(summary, metric, name, tested, config.run.rounds)


def _take_variances(config: Config, built: Built) -> Built:
    """With variances and penalty as arguments: all their values share a program."""
    algorithm: Any = config.algorithm
    keys = ("level", "slopes", "ridge")
    values = {f"algorithm.{key}": getattr(algorithm, key) for key in keys}
    found = join_points([Point(config.name, values, config)], built)
    spec = dataclasses.replace(built.spec, algorithm=found.algorithm, over=found.over)
    return built._replace(spec=spec)


def train_on_all_rows(
    name: str, config: Config, setting: Mapping[str, float], folder: Path
) -> None:
    """Write the models of a method that are trained on all rows.

    Linear models are solved for, as those of the verdict were; others are trained in
    rounds. Nothing is measured: no row is left that they did not see.

    Args:
        name: of the method.
        config: of a run that holds out no rows.
        setting: of the method.
        folder: of the models.
    """
    built, place = build(config), run_folder.Folder(folder)
    seeds, train = run_folder.seeds_of(config), built.federated_data.train
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_preprocessing(place, built.preprocessing, seeds)
    if config.algorithm.name != "hierarchical":
        spec = dataclasses.replace(built.spec, measure={}, splits=None)
        run = set_up(spec).complete()
        run_folder.write_models(place, run, seeds)
        run_folder.write_personal_models(place, run, seeds, built.algorithm, "always")
        return
    rows, setting = scale_rows(built.task, train), dict(setting)
    if bins := int(setting.pop("bins", 0)):
        rows = add_bins(rows, bins)
    with threadpool_limits(1):
        found = models(built.task, name, rows, setting)
    shared = np.zeros_like(found[0])
    if name != ALONE:
        shared = shared_part(built.task.kind, rows, found, **setting)
    for path, entries in ((place.model(None), shared), (place.personal(None), found)):
        parts = entries.reshape(*entries.shape[:-1], built.task.outputs, -1)
        parts = parts.astype(np.float32)
        params: Any = Affine(parts[..., 1:], parts[..., 0])  # type: ignore
        run_folder.write_model(path, params, seed=seeds[0], round=config.run.rounds)


def distance_warning(
    summary: dict[str, Any], metric: str, name: str, tested: float, rounds: int
) -> str | None:
    """A warning where a kept run has not reached the models of the verdict."""
    personal = [run["measures"]["test"]["personal"] for run in summary["runs"]]
    ended = float(np.mean([one[metric]["mean"] for one in personal]))
    if abs(ended - tested) <= FAR[BY_NAME[name].model] * abs(tested):
        return None
    return (
        f"the run of {BY_NAME[name].title} that is kept has a test {metric} of "
        f"{ended:.4g} after {rounds} rounds, the models of the verdict have "
        f"{tested:.4g}: deploy it with more rounds"
    )

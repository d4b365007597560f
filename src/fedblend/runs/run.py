# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Run a configuration: its stages, its checkpoints, and the folder of results.

A run has up to three stages. "trial" finds how many rounds of training alone are best
(left out where ``measure.local`` is a number), "local" trains every client alone for
that many rounds, for comparison (left out with ``measure.local = false``), "federated"
runs the algorithm. After every block of rounds a checkpoint is written, then the rows.
``resume`` continues a run that was killed, with the same bits as an uninterrupted run,
or with new noise if the run is private; rows come from the records in the checkpoint,
so that none is missing or doubled.

What every client could do without the others often costs more than the run that is
compared with it, and does not depend on how models are mixed. Runs whose work of
training alone is equal (``work_alone``) take it from each other: its checkpoints are
copied, and the later run restores them as if it had been interrupted there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.config.build import Built, build
from fedblend.config.config import Config, difference, dump, rename_errors
from fedblend.config.tables import privacy
from fedblend.config.tables.local_work import LocalWork
from fedblend.errors import CheckpointError, ConfigError, RunError
from fedblend.metrics import main_first
from fedblend.runs import certificates, results, run_folder
from fedblend.runs.run_folder import Folder, seeds_of
from fedblend.simulation import checkpoint, train_alone
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import RunSpec, set_up
from fedblend.simulation.stores.client_store import make_storage
from fedblend.trees import precision

TABLES = {
    "dp_blt": "privacy",
    "dp_fedavg": "privacy",
    "mixed_fl": "central",
    "strata": "populations",
}
"""The tables of a configuration by what they build."""
STAGES = ("trial", "local")
NOT_ALONE = {
    *("cohort", "epoch", "separation", "sampling", "weights", "dropout"),
    *("reduction", "trim", "until"),
}
"""Keys of ``[run]`` that are about clients together."""
RATE = {"rate", "optimizer", "schedule"}
"""Keys of ``[algorithm]`` that ``measure.local_rate`` takes the place of."""
ROWS = ("classes", "share")
"""Keys of ``[central]`` that decide which rows are the clients'."""
LONG = 20.0
"""Seconds of measuring after which a warning says how to measure less."""


class Step(NamedTuple):
    """The progress of a run, reported after every block of rounds."""

    stage: str
    """"trial", "local" or "federated"."""
    round: int
    rounds: int
    """The planned rounds of the stage; a trial plans more as it goes on."""


def run_config(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    on_step: Callable[[Step], None] = lambda step: None,
    on_warning: Callable[[str], None] = lambda line: None,
    local: Run | None = None,
) -> dict[str, Any]:
    """Run a configuration and write its folder.

    Args:
        config: what to run.
        out: the folder; it must not hold a run yet, unless ``resume``.
        resume: continue the run in the folder, or begin it if there is none. A
            finished run is not changed.
        on_step: called after every block of rounds.
        on_warning: called with each warning, one line.
        local: training alone as ``measure.local`` asks for it, where it was computed
            already.

    Returns:
        The summary, as in ``summary.json``.
    """
    folder = Folder(out)
    _check_place(folder, config, resume)
    if resume and folder.summary.exists():
        found = run_folder.read_summary(folder)
        for warning in found.get("warnings", ()):
            on_warning(warning)
        return found
    with precision(config.run.precision):
        built = build(config)
        for warning in built.warnings:
            on_warning(warning)
        _check_data(folder, built)
        # Clients train alone for as long as is best for the metric that is shown first.
        metric = main_first(built.measures)[0]
        return run_built(
            config,
            built,
            out,
            metric,
            local=local,
            on_step=on_step,
            on_warning=on_warning,
        )[0]


def run_built(
    config: Config,
    built: Built,
    out: Path,
    metric: str,
    *,
    local: Run | None = None,
    like: Run | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_warning: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Run]:
    """Run what a configuration built, and write its folder; the summary and the run.

    Args:
        config: what to run.
        built: what it builds.
        out: the folder; a run that was begun there continues.
        metric: for which clients train alone as long as is best.
        local: training alone, where it was computed already.
        like: a run whose programs serve this one, see ``Run.share_programs``.
        on_step: called after every block of rounds.
        on_warning: called with each warning, one line.
    """
    folder = Folder(out)
    blocks = certificates.blocks_of(config, built)
    runs = stages(config, built, folder, metric, local)
    promised = {}
    if config.privacy is not None:
        clients, raw = built.federated_data.clients, bool(built.preprocessing)
        promised = privacy.report(config, clients, raw)
    open_folder(folder, config, built)
    run = runs["federated"]
    if like is not None:
        run.share_programs(like)
    watched = _watch(run, config, on_step, on_warning)
    for stage in runs:
        advance(folder, config, stage, runs, metric, watched, blocks)
    return results.write_summary(folder, config, built, run, promised, on_warning), run


def _watch(
    run: Run,
    config: Config,
    on_step: Callable[[Step], None],
    on_warning: Callable[[str], None],
) -> Callable[[Step], None]:
    """``on_step``, and a warning where a run is measured for long."""
    told = False

    def watch(step: Step) -> None:
        nonlocal told
        if run.measure_seconds > LONG and not told:
            told = True
            on_warning(
                f"measuring took {run.measure_seconds:.0f} s, and comes every "
                f'{config.run.every} rounds; measure.splits = ["test"], '
                "measure.on = 100 or a larger run.every make it less"
            )
        on_step(step)

    return watch


def _check_place(folder: Folder, config: Config, resume: bool) -> None:
    """Refuse to overwrite a run, and to continue another one."""
    if not folder.config.exists() and not folder.checkpoint("federated").exists():
        return
    if not resume:
        raise RunError(
            f"{folder.path}: holds a run already; --resume continues it, --out names "
            "another folder"
        )
    other = difference(run_folder.read_config(folder), config)
    if other:
        raise RunError(f"{folder.path}: holds a run of another config: {other}")


def _check_data(folder: Folder, built: Built) -> None:
    """Refuse to continue with other data than the run began with."""
    if not folder.origin.exists():
        return
    there = run_folder.read_json(folder.origin).get("data") or {}
    for name, value in built.facts.items():
        if there.get(name) != value:
            raise RunError(
                f"{folder.path}: the data changed since the run began: {name} was "
                f"{there.get(name)}, now it is {value}"
            )


def open_folder(folder: Folder, config: Config, built: Built) -> None:
    """Write what is known before the first round."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.origin.exists():
        known = {**results.origin(built), "task": built.task._asdict()}
        run_folder.write_text(folder.origin, run_folder.json_text(known))
        run_folder.write_preprocessing(folder, built.preprocessing, seeds_of(config))
    if not folder.config.exists():
        run_folder.write_text(folder.config, dump(config))


def stages(
    config: Config,
    built: Built,
    folder: Folder,
    metric: str,
    given: Run | None = None,
) -> dict[str, Run]:
    """The stages of a run in order; nothing is computed yet but a rate to be tuned.

    Args:
        config: what to run.
        built: what it builds.
        folder: where client states go, if they are stored on disk.
        metric: for which clients train alone as long as is best.
        given: a completed run of training alone, instead of one of this run's own.
    """
    local = built.local if built.by_split is None else built.by_split.local
    runs: dict[str, Run] = {}

    def place_states(stage: str, spec: RunSpec) -> RunSpec:
        if config.run.store not in ("disk", "auto"):
            return spec
        own = make_storage(spec.store)
        files = dataclasses.replace(own, folder=folder.states(stage))
        return dataclasses.replace(spec, store=files)

    with rename_errors(**TABLES):
        if local is not None and given is None:
            own = dataclasses.replace(built.spec, algorithm=local)
            own, alone = train_alone.spec_alone(own), config.measure.local
            factor, seconds = 1.0, 0.0
            if built.local_at is not None:
                # Constants of splits decide on the rate alone, which is tuned.
                own = dataclasses.replace(own, over=None)
                factor, seconds = _tune_rate(own, built.local_at, folder, metric)
                own = dataclasses.replace(own, algorithm=built.local_at(factor))
            if isinstance(alone, bool):
                runs["trial"] = train_alone.trial_run(
                    place_states("trial", own), metric
                )
            else:
                own = dataclasses.replace(own, rounds=alone)
            runs["local"] = set_up(place_states("local", own))
            runs["local"].budget = train_alone.LocalBudget(own.rounds, rate=factor)
            runs["local"].earlier_seconds = seconds
        spec = dataclasses.replace(built.spec, local=given or runs.get("local"))
        runs["federated"] = set_up(place_states("federated", spec))
    return runs


def _tune_rate(
    spec: RunSpec, build: Callable[[Any], Any], folder: Folder, metric: str
) -> tuple[float, float]:
    """The factor of the rate and the seconds to find it, from a checkpoint if any."""
    for stage in STAGES:
        path = folder.checkpoint(stage)
        if path.exists():
            about = checkpoint.read_about(path)
            return float(about.get("rate", 1.0)), float(about.get("tuning", 0.0))
    return train_alone.tune_rate(spec, build, metric)


def advance(
    folder: Folder,
    config: Config,
    stage: str,
    runs: Mapping[str, Run],
    metric: str,
    on_step: Callable[[Step], None],
    blocks_of: Callable[[Run], Iterable[Any]] = lambda run: run,
) -> None:
    """Run a stage to its end, from its checkpoint if there is one.

    Args:
        folder: where the checkpoint is; rows of the federated stage go there too.
        config: the owner of the checkpoint.
        stage: which one.
        runs: all stages; those before it are at their end.
        metric: see ``stages``.
        on_step: called after every block of rounds.
        blocks_of: from the federated stage to those of its blocks that are run.
    """
    run, rounds = runs[stage], config.run.rounds
    blocks: Iterable[Any] = blocks_of(run) if stage == "federated" else run
    if stage == "trial":
        blocks = train_alone.prolong(run, metric, rounds)
    elif stage == "local" and "trial" in runs:
        train_alone.set_best_length(run, runs["trial"], metric, rounds)
    path, about = folder.checkpoint(stage), {"config": dump(config)}
    if stage in STAGES and (budget := runs["local"].budget) is not None:
        about["rate"] = repr(budget.rate)
        about["tuning"] = repr(runs["local"].earlier_seconds)

    def report() -> None:
        if stage == "federated" and run.records:
            run_folder.write_metrics(folder, run, seeds_of(config))
        on_step(Step(stage, run.round, run.rounds))

    if path.exists():
        check_owner(path, config)
        checkpoint.restore(path, run)
        report()
    for _ in blocks:
        checkpoint.save(path, run, about)
        report()


def check_owner(path: Path, config: Config) -> None:
    """Refuse the checkpoint of another configuration."""
    text = checkpoint.read_about(path).get("config", "")
    try:
        there = run_folder.config_in(text, "its config")
    except (ConfigError, RunError) as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None
    other = difference(there, config)
    if other:
        raise CheckpointError(f"checkpoint {path}: belongs to another config: {other}")


def work_alone(config: Config) -> dict[str, Any] | None:
    """All keys that training alone depends on; None where nobody trains alone."""
    if not config.measure.local or not config.algorithm.entry.sends:
        return None
    options, central = config.algorithm, config.central
    work = set(LocalWork.model_fields)
    if isinstance(config.measure.local_rate, float):
        work -= RATE
    return {
        "data": config.data.model_dump(),
        "central": {key: getattr(central, key, None) for key in ROWS},
        "model": config.model.model_dump(),
        "algorithm": {key: getattr(options, key) for key in sorted(work)},
        "run": config.run.model_dump(exclude={*NOT_ALONE, "keep_personal"}),
        "measure": config.measure.model_dump(),
    }


def share_alone(done: Folder, config: Config, folder: Folder) -> bool:
    """Copy training alone from a finished run to one that is about to begin.

    Args:
        done: a finished run whose ``work_alone`` is equal.
        config: that of the other run.
        folder: the folder of the other run; what it has of its own stays.

    Returns:
        Whether there was something to copy. A store on disk stays where it is.
    """
    if done.states("local").exists() or not done.checkpoint("local").exists():
        return False
    folder.path.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        there, here = done.checkpoint(stage), folder.checkpoint(stage)
        if there.exists() and not here.exists():
            checkpoint.copy(there, here, {"config": dump(config)})
    return True

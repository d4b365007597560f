# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Running a configuration: two stages, checkpoints, and the folder of results.

First every client trains alone, for comparison (stage "local", left out where it is
not asked for), for as many rounds as a trial has shown to be best (stage "trial", left
out where a number is asked for). Then the algorithm runs (stage "federated"). After
every block of rounds
a checkpoint is written, then the rows. A run that is killed goes on from there with
``resume``, bit for bit as if nothing had happened; rows are written from the records in
the checkpoint, so that none is missing or there twice.
"""

import dataclasses
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend.config import central, privacy, toml
from fedblend.config.build import Built, build
from fedblend.config.config import Config, check, difference, dump
from fedblend.config.errors import named_by_key
from fedblend.config.schema.table import ConfigError, RunError
from fedblend.config.tasks import loss_name
from fedblend.experiments import (
    checks,
    harm,
    local_models,
    mixing_weights,
    run_folder,
    unseen_clients,
)
from fedblend.experiments.run_folder import Folder
from fedblend.gains import harms
from fedblend.report.harm import plot_harm, sentence
from fedblend.report.series import in_order
from fedblend.simulation import checkpoint, train_alone
from fedblend.simulation.checkpoint import CheckpointError
from fedblend.simulation.precision import precision
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import set_up
from fedblend.simulation.spec import RunSpec


class Step(NamedTuple):
    """How far a run is, said after every block."""

    stage: str
    """"trial", "local" or "federated"."""
    round: int
    rounds: int
    """Those that are planned; a trial plans more as it goes on."""


def run_config(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    on_step: Callable[[Step], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run a configuration and write its folder.

    Args:
        config: what to run.
        out: the folder; it must not hold a run yet, unless ``resume``.
        resume: go on with the run in the folder, or begin it if there is none. A
            finished one is left as it is.
        on_step: called after every block of rounds.
        on_warning: called with what is odd but no error, a line each.

    Returns:
        The summary, as in ``summary.json``.
    """
    folder = Folder(out)
    _check_place(folder, config, resume)
    if resume and folder.summary.exists():
        found = run_folder.read_summary(folder)
        for warning in found.get("warnings", ()):
            (on_warning or _silent)(warning)
        return found
    with precision(config.run.precision):
        built = build(config)
        for warning in built.warnings:
            (on_warning or _silent)(warning)
        _check_data(folder, built)
        runs = _runs(config, built, folder)
        promised = privacy.report(config, built.federated_data.clients)
        _open(folder, config, built)
        for stage, run in runs.items():
            blocks, metric = run, _deciding(built)
            if stage == "trial":
                blocks = train_alone.prolonged(run, metric, config.run.rounds)
            elif stage == "local" and "trial" in runs:
                trial, rounds = runs["trial"], config.run.rounds
                train_alone.of_best_length(run, trial, metric, rounds)
            _advance(folder, config, stage, run, blocks, on_step)
        federated, warn = runs["federated"], on_warning or _silent
        return _finish(folder, config, built, federated, promised, warn)


def _silent(news: Any) -> None:
    del news


def _check_place(folder: Folder, config: Config, resume: bool) -> None:
    """Refuse to overwrite a run, and to go on with another one."""
    if not any(
        path.exists() for path in (folder.config, folder.checkpoint("federated"))
    ):
        return
    if not resume:
        raise RunError(
            f"{folder.path}: holds a run already; --resume goes on with it, --out "
            "names another folder"
        )
    try:
        there = check(toml.read(folder.config), str(folder.config))
    except ConfigError as error:
        raise RunError(str(error)) from None
    other = difference(there, config)
    if other:
        raise RunError(f"{folder.path}: holds a run of another config: {other}")


def _check_data(folder: Folder, built: Built) -> None:
    """Refuse to go on with other data than the run began with."""
    if not folder.origin.exists():
        return
    there = run_folder.read_json(folder.origin).get("data") or {}
    for name, value in built.facts.items():
        if there.get(name) != value:
            raise RunError(
                f"{folder.path}: the data changed since the run began: {name} was "
                f"{there.get(name)}, now it is {value}"
            )


def _open(folder: Folder, config: Config, built: Built) -> None:
    """Write what is known before the first round; a folder so opened holds a run."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.origin.exists():
        known = {**_origin(built), "task": built.task._asdict()}
        run_folder.write_text(folder.origin, run_folder.as_json(known))
    if not folder.config.exists():
        run_folder.write_text(folder.config, dump(config))


def _origin(built: Built) -> dict[str, Any]:
    from fedblend import __version__

    return {
        "fedblend": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "data": built.facts,
    }


def _runs(config: Config, built: Built, folder: Folder) -> dict[str, Run]:
    """The stages in order; nothing is computed yet."""
    algorithms = built if built.by_split is None else built.by_split
    over = None if built.by_split is None else built.by_split.over
    asked, runs = dataclasses.replace(built.spec, over=over), {}

    def start(stage: str, algorithm: Any, spec: RunSpec) -> Run:
        spec = dataclasses.replace(spec, store_folder=_states(config, folder, stage))
        return set_up(algorithm, built.model.init, built.federations, built.key, spec)

    names = {"private": "privacy", "mixed": "central", "strata": "populations"}
    with named_by_key(**names, select="select"):
        if algorithms.local is not None:
            own = train_alone.without_others(asked, built.federations, built.key)
            alone = config.measure.local
            if isinstance(alone, bool):
                held = _states(config, folder, "trial")
                runs["trial"] = train_alone.trying(
                    algorithms.local,
                    built.model.init,
                    built.federations,
                    built.key,
                    _deciding(built),
                    dataclasses.replace(own, store_folder=held),
                )
            else:
                own = dataclasses.replace(own, rounds=alone)
            runs["local"] = start("local", algorithms.local, own)
        spec = dataclasses.replace(asked, local=runs.get("local"))
        runs["federated"] = start("federated", algorithms.algorithm, spec)
    return runs


def _deciding(built: Built) -> str:
    """The metric that decides how long clients train alone: the one shown first."""
    return in_order(built.measures)[0]


def _states(config: Config, folder: Folder, stage: str) -> Path | None:
    return folder.states(stage) if config.run.store in ("disk", "auto") else None


def _advance(
    folder: Folder,
    config: Config,
    stage: str,
    run: Run,
    blocks: Iterable[Any],
    on_step: Callable[[Step], None] | None,
) -> None:
    """Take a stage to its end, from its checkpoint if there is one."""
    path, text = folder.checkpoint(stage), dump(config)
    report = on_step or _silent
    if path.exists():
        _check_owner(path, config)
        checkpoint.restore(path, run)
        report(Step(stage, run.round, run.rounds))
    if run.records and stage == "federated":
        run_folder.write_metrics(folder, run, _seeds(config))
    for _ in blocks:
        checkpoint.save(path, run, {"config": text})
        if stage == "federated":
            run_folder.write_metrics(folder, run, _seeds(config))
        report(Step(stage, run.round, run.rounds))


def _check_owner(path: Path, config: Config) -> None:
    """Refuse the checkpoint of another configuration."""
    text = checkpoint.read_about(path).get("config", "")
    try:
        there = check(toml.parse(text, "its config"), "its config")
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None
    other = difference(there, config)
    if other:
        raise CheckpointError(f"checkpoint {path}: belongs to another config: {other}")


def _seeds(config: Config) -> list[int]:
    seed = config.run.seed
    return [seed] if isinstance(seed, int) else seed


def _finish(
    folder: Folder,
    config: Config,
    built: Built,
    run: Run,
    promised: dict[str, Any],
    on_warning: Callable[[str], None],
) -> dict[str, Any]:
    """Write what is known at the end; the summary last, it says that all is there."""
    own_models, warnings = local_models.report(run, config.algorithm)
    own_weights, doubts = mixing_weights.report(run, config.algorithm)
    seeds = _seeds(config)
    odd = checks.at_end(run, loss_name(config, built.task), seeds)
    warnings = [*warnings, *doubts, *_unfinished(run), *odd]
    for warning in warnings:
        on_warning(warning)
    run_folder.write_models(folder, run, seeds)
    columns = local_models.columns(run) | mixing_weights.columns(run)
    if run.alone is not None:
        shape = (
            len(run.measured_ids),
            *([] if run.replicas is None else [run.replicas]),
        )
        columns["local_rounds"] = np.full(shape, run.alone["rounds"])
    joined = unseen_clients.join(run, config, built)
    harmed = harm.harm_of(run, run_folder.rows(run, seeds), columns)
    columns |= harm.columns(run, harmed and harmed.found)
    run_folder.write_clients(folder, run, seeds, columns, joined)
    if harmed is not None:
        harm.write_harm(folder, harmed)
    _draw(folder, run, seeds, harmed)
    found = [run.summary()] if run.replicas is None else run.summary()
    newly = [unseen_clients.report(one, run.round) for one in joined] or [{}] * len(
        seeds
    )
    models = run_folder.models(run)
    at_server = central.report(built.server, models, built.measures)
    summary = {
        "name": config.name,
        "algorithm": getattr(config.algorithm, "name"),  # noqa: B009
        **_origin(built),
        "warnings": [*built.warnings, *warnings],
        **own_models,
        **own_weights,
        **promised,
        **({} if harmed is None else {"harm": sentence(harmed.found, run.alone)}),
        "harmed": harms(run.evidence),
        **(
            {"unseen": {"harmed": harms(unseen_clients.evidence(joined))}}
            if joined
            else {}
        ),
        "runs": [
            {"seed": s, **one, **more, **own}
            for s, one, more, own in zip(seeds, found, newly, at_server, strict=True)
        ],
    }
    run_folder.write_text(folder.summary, run_folder.as_json(summary))
    return run_folder.read_json(folder.summary)


def _unfinished(run: Run) -> list[str]:
    """What a user is warned of where training alone was cut short."""
    if run.alone is None or not run.alone["improving"]:
        return []
    tried, best = run.alone["tried"], run.alone["rounds"]
    return [
        f"training alone still improved when {tried} rounds, the most that are tried, "
        f"were over; it is compared with at {best}, and measure.local = N asks for more"
    ]


def _draw(folder: Folder, run: Run, seeds: list[int], harmed: harm.Harm | None) -> None:
    from fedblend.report.figures import plot_rows

    rows = run_folder.rows(run, seeds)
    plot_rows(rows, folder.figures, run.evidence, run.alone)
    if harmed is not None:
        plot_harm(*harmed, folder.figures / "harm", run.alone)

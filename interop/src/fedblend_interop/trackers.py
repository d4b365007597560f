# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Trackers: the records of a run for TensorBoard, MLflow and Weights & Biases.

A tracker takes rows, as in ``metrics.jsonl``, and writes each once. What it wrote of
the same run before is replaced, so a run that is resumed, or tracked again after the
fact, has no point twice. Everything is written to local files, in folders of the run,
unless the variables of the environment that MLflow and Weights & Biases read
(``MLFLOW_TRACKING_URI``, ``WANDB_MODE``) say otherwise.

Values are means over clients under ``SPLIT/METRIC/MODEL``, such as
``test/accuracy/personal``, at the number of rounds; ``worst_tenth/...`` are the means
of the worst tenth of the clients; ``bits/up`` and ``bits/down`` are totals so far.

Example::

    for record in fb.trackers.follow(run, fb.trackers.tensorboard("logs")):
        print(record.round)
"""

import hashlib
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.errors import UserError
from fedblend.extras import require
from fedblend.report.measures import Row, rows_of
from fedblend.simulation.run import Run

COUNTS = ("seconds", "received", "dropped", "rejected")
"""Further numbers of a block of rounds."""
SUFFIX = ".fedblend"
"""The end of the names of TensorBoard's files that are written here."""


MOST_PARAMS = 100
"""What MLflow takes at once; it takes 1000 metrics."""


class SeedLog(NamedTuple):
    """Where the values of one seed go: ``write(round, values)``, and ``close()``."""

    write: Callable[[int, Mapping[str, float]], Any]
    close: Callable[[], Any]


class Tracker:
    """Writes the rows of a run; ``open_seed`` opens the log of a seed."""

    def __init__(self, open_seed: Callable[[int], SeedLog]):
        self._open_seed = open_seed
        self._seed_logs: dict[int, SeedLog] = {}
        self._written: set[tuple[int, int]] = set()

    def update(self, rows: Sequence[Row]) -> None:
        """Write those of these rows that are new."""
        for row in rows:
            seed, round = row.get("seed", 0), row["round"]
            if seed not in self._seed_logs:
                self._seed_logs[seed] = self._open_seed(seed)
            if (seed, round) not in self._written:
                self._seed_logs[seed].write(round, values_of(row))
                self._written.add((seed, round))

    def close(self) -> None:
        """Finish what was written."""
        for log in self._seed_logs.values():
            log.close()


def values_of(row: Row) -> dict[str, float]:
    """The numbers of a row by the names under which trackers have them."""
    found = {f"bits/{way}": row[f"bits_{way}"] for way in ("up", "down")}
    found |= {f"rounds/{name}": row[name] for name in COUNTS}
    for split, models in row["measures"].items():
        for model, metrics in models.items():
            for metric, spread in metrics.items():
                # MLflow allows no @ in a name.
                name = f"{split}/{metric.replace('@', '_at_')}/{model}"
                found[name] = spread["mean"]
                found[f"worst_tenth/{name}"] = spread["worst_tenth"]
    numbers = {name: value for name, value in found.items() if value is not None}
    return {
        name: float(value) for name, value in numbers.items() if math.isfinite(value)
    }


def tensorboard(folder: str | Path) -> Tracker:
    """A tracker that writes event files of TensorBoard, a folder for each seed."""
    writing = require(
        "tensorboard.summary.writer.event_file_writer", "tensorboard", extra="trackers"
    )
    protos = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
    events = require("tensorboard.compat.proto.event_pb2", "tensorboard")

    def open_seed(seed: int) -> SeedLog:
        place = Path(folder) / f"seed{seed}"
        for old in place.glob(f"events.out.tfevents.*{SUFFIX}"):
            old.unlink()
        writer = writing.EventFileWriter(str(place), filename_suffix=SUFFIX)

        def write(round: int, values: Mapping[str, float]) -> None:
            scalar = protos.Summary.Value
            points = [scalar(tag=key, simple_value=of) for key, of in values.items()]
            summary = protos.Summary(value=points)
            now = time.time()
            writer.add_event(events.Event(wall_time=now, step=round, summary=summary))
            writer.flush()

        return SeedLog(write, writer.close)

    return Tracker(open_seed)


def mlflow(
    folder: str | Path, name: str = "fedblend", params: Mapping[str, str] = {}
) -> Tracker:
    """A tracker that writes an MLflow store (SQLite) to a folder.

    Args:
        folder: of the store, unless ``MLFLOW_TRACKING_URI`` names another.
        name: of the experiment.
        params: what the run was made with.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    package = require("mlflow", "tracker mlflow", "mlflow-skinny", "trackers")
    entities = require("mlflow.entities", "tracker mlflow")
    for noisy in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    place = Path(folder).resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        require("sqlalchemy", "tracker mlflow", "sqlalchemy", "trackers")
        place.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{place / 'mlflow.db'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        client = package.MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)

    def open_seed(seed: int) -> SeedLog:
        tags = {"fedblend.folder": str(place).replace("'", ""), "seed": str(seed)}
        mine = " and ".join(f"tags.`{key}` = '{of}'" for key, of in tags.items())
        for old in client.search_runs([experiment], mine):
            client.delete_run(old.info.run_id)
        run = client.create_run(experiment, tags=tags, run_name=f"seed {seed}")
        run = run.info.run_id
        given = [entities.Param(key, value[:500]) for key, value in params.items()]
        client.log_batch(run, params=given[:MOST_PARAMS])

        def write(round: int, values: Mapping[str, float]) -> None:
            now, metric = int(time.time() * 1000), entities.Metric
            points = [metric(key, value, now, round) for key, value in values.items()]
            client.log_batch(run, metrics=points)

        return SeedLog(write, lambda: client.set_terminated(run))

    return Tracker(open_seed)


def wandb(
    folder: str | Path, name: str = "fedblend", params: Mapping[str, str] = {}
) -> Tracker:
    """A tracker that writes offline runs of Weights & Biases to a folder.

    Args:
        folder: of the runs; ``wandb sync`` uploads what is in it.
        name: of the project.
        params: what the run was made with.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    package = require("wandb", "tracker wandb", "wandb", "trackers")
    place = Path(folder).resolve()

    def open_seed(seed: int) -> SeedLog:
        own = hashlib.sha256(f"{place} {seed}".encode()).hexdigest()[:10]
        for old in place.glob(f"wandb/offline-run-*-{own}"):
            shutil.rmtree(old)
        place.mkdir(parents=True, exist_ok=True)
        run = package.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(place),
            project=name,
            id=own,
            name=f"seed {seed}",
            config=dict(params),
            reinit="create_new",
            settings=package.Settings(silent=True, console="off"),
        )
        return SeedLog(
            lambda round, values: run.log(dict(values), step=round), run.finish
        )

    return Tracker(open_seed)


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, str]], Tracker]] = {
    "tensorboard": lambda folder, name, params: tensorboard(folder),
    "mlflow": mlflow,
    "wandb": wandb,
}
"""The trackers of a run folder, by name."""


def folder_trackers(
    names: Sequence[str], folder: Path, name: str, tables: Mapping[str, Any]
) -> list[Tracker]:
    """Trackers of a run, each in a folder of its own inside that of the run.

    Args:
        names: of ``TRACKERS``.
        folder: of the run; it may not exist yet.
        name: of the run.
        tables: its configuration as nested tables.
    """
    for one in names:
        if one not in TRACKERS:
            raise UserError("tracker", one, f"one of {', '.join(TRACKERS)}")
    params = dict(_flat(tables))
    return [TRACKERS[one](folder / one, name, params) for one in dict.fromkeys(names)]


def follow(
    run: Run, *trackers: Tracker, seeds: Sequence[int] | None = None
) -> Iterator[Any]:
    """Go through a run, record by record, and have trackers write them.

    Args:
        run: a simulation, which continues from where it is.
        *trackers: they are closed at the end.
        seeds: the seed of each replica; 0, 1, ... if None.
    """
    try:
        for record in run:
            rows = rows_of(run, seeds)
            for tracker in trackers:
                tracker.update(rows)
            yield record
    finally:
        for tracker in trackers:
            tracker.close()


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The keys of nested tables, such as ``run.rounds``, and their values as texts."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", str(value)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Trackers: the records of a run for TensorBoard, MLflow and Weights & Biases.

A tracker consumes rows, as in ``metrics.jsonl``, and writes each once: a run that is
resumed, or tracked again after the fact, has no point twice. Everything is written to
local files, in folders of the run, unless the variables of the environment that MLflow
and Weights & Biases read (``MLFLOW_TRACKING_URI``, ``WANDB_MODE``) say otherwise.

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
from typing import Any

from fedblend.data.dataset import require
from fedblend.errors import UserError
from fedblend.report.measures import Row, rows_of
from fedblend.runs import run_folder
from fedblend.runs.run_folder import Folder
from fedblend.simulation.run import Run

COUNTS = ("seconds", "received", "dropped", "rejected")
"""Further numbers of a block of rounds."""
SUFFIX = ".fedblend"
"""The end of the names of TensorBoard's files that are written here."""


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


class Tracker:
    """Writes rows to one place; ``close`` when all are written.

    A subclass opens what it needs for a seed, which may know rounds that are written
    already, and writes the values of a round.
    """

    def __init__(self) -> None:
        self._written: dict[int, set[int]] = {}

    def update(self, rows: Sequence[Row]) -> None:
        """Write those of these rows that are new."""
        for row in rows:
            seed, round = row.get("seed", 0), row["round"]
            if seed not in self._written:
                self._written[seed] = self._open(seed)
            if round not in self._written[seed]:
                self._write(seed, round, values_of(row))
                self._written[seed].add(round)
        self._flush()

    def close(self) -> None:
        """Finish what was written."""

    def _open(self, seed: int) -> set[int]:
        """Begin to write the rows of a seed; the rounds that are there already."""
        raise NotImplementedError

    def _write(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        """Have on disk what was written."""


class TensorBoard(Tracker):
    """Event files, a folder for each seed; what was written before is replaced."""

    def __init__(self, folder: Path, config: str = ""):
        super().__init__()
        self._writing = require(
            "tensorboard.summary.writer.event_file_writer",
            "tracker tensorboard",
            extra="trackers",
        )
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._event = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._folder, self._config = folder, config
        self._writers: dict[int, Any] = {}

    def _open(self, seed: int) -> set[int]:
        place = self._folder / f"seed{seed}"
        for old in place.glob(f"events.out.tfevents.*{SUFFIX}"):
            old.unlink()
        place.mkdir(parents=True, exist_ok=True)
        writer = self._writing.EventFileWriter(str(place), filename_suffix=SUFFIX)
        self._writers[seed] = writer
        if self._config:
            self._add(seed, 0, [self._text("config", self._config)])
        return set()

    def _text(self, name: str, text: str) -> Any:
        tensor = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        types = require("tensorboard.compat.proto.types_pb2", "tensorboard")
        proto = self._summary
        about = proto.SummaryMetadata(
            plugin_data=proto.SummaryMetadata.PluginData(plugin_name="text")
        )
        block = "".join(f"    {line}\n" for line in text.splitlines())
        value = tensor.TensorProto(dtype=types.DT_STRING, string_val=[block.encode()])
        return proto.Summary.Value(tag=name, metadata=about, tensor=value)

    def _write(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        scalar = self._summary.Summary.Value
        entries = [
            scalar(tag=name, simple_value=value) for name, value in values.items()
        ]
        self._add(seed, round, entries)

    def _add(self, seed: int, round: int, entries: list[Any]) -> None:
        summary = self._summary.Summary(value=entries)
        event = self._event.Event(wall_time=time.time(), step=round, summary=summary)
        self._writers[seed].add_event(event)

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


class MLflow(Tracker):
    """A run of MLflow for each seed; one that is there already is continued."""

    def __init__(
        self, folder: Path, name: str = "fedblend", params: Mapping[str, str] = {}
    ):
        super().__init__()
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = require("mlflow", "tracker mlflow", "mlflow-skinny", "trackers")
        self._entities = require("mlflow.entities", "tracker mlflow")
        for noisy in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            require("sqlalchemy", "tracker mlflow", "sqlalchemy", "trackers")
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._origin, self._params = str(folder.resolve()), dict(params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that it imports
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(name)
            self._experiment = (
                self._client.create_experiment(name)
                if found is None
                else found.experiment_id
            )
        self._runs: dict[int, str] = {}

    def _open(self, seed: int) -> set[int]:
        origin = self._origin.replace("'", "")
        chosen = f"tags.`fedblend.folder` = '{origin}' and tags.seed = '{seed}'"
        found = self._client.search_runs([self._experiment], chosen)
        if found:
            self._runs[seed] = found[0].info.run_id
            self._client.update_run(self._runs[seed], status="RUNNING")
            points = self._client.get_metric_history(self._runs[seed], "bits/up")
            return {point.step for point in points}
        tags = {"fedblend.folder": origin, "seed": str(seed)}
        run = self._client.create_run(
            self._experiment, tags=tags, run_name=f"seed {seed}"
        )
        self._runs[seed] = run.info.run_id
        param = self._entities.Param
        params = [param(key, value[:500]) for key, value in self._params.items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[first : first + 100])
        return set()

    def _write(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        points = [metric(name, value, now, round) for name, value in values.items()]
        # "bits/up" comes first and alone tells whether a round is written: last batch.
        for first in reversed(range(0, len(points), 500)):
            batch = points[first : first + 500]
            self._client.log_batch(self._runs[seed], metrics=batch)

    def close(self) -> None:
        """Mark the runs as finished."""
        for run in self._runs.values():
            self._client.set_terminated(run)


class WandB(Tracker):
    """An offline run of Weights & Biases for each seed; an earlier one is replaced."""

    def __init__(
        self, folder: Path, name: str = "fedblend", params: Mapping[str, str] = {}
    ):
        super().__init__()
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = require("wandb", "tracker wandb", "wandb", "trackers")
        self._folder, self._name, self._params = folder, name, dict(params)
        self._runs: dict[int, Any] = {}

    def _open(self, seed: int) -> set[int]:
        origin = f"{self._folder.resolve()} {seed}"
        own = hashlib.sha256(origin.encode()).hexdigest()[:10]
        for old in self._folder.glob(f"wandb/offline-run-*-{own}"):
            shutil.rmtree(old)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._runs[seed] = self._wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(self._folder),
            project=self._name,
            id=own,
            name=f"seed {seed}",
            config=self._params,
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        return set()

    def _write(self, seed: int, round: int, values: Mapping[str, float]) -> None:
        self._runs[seed].log(dict(values), step=round)

    def close(self) -> None:
        """Finish the runs."""
        for run in self._runs.values():
            run.finish()


def tensorboard(folder: str | Path) -> Tracker:
    """A tracker that writes event files of TensorBoard, a folder for each seed."""
    return TensorBoard(Path(folder))


def mlflow(folder: str | Path, name: str = "fedblend") -> Tracker:
    """A tracker that writes an MLflow store (SQLite) to a folder.

    Args:
        folder: of the store, unless ``MLFLOW_TRACKING_URI`` names another.
        name: of the experiment.
    """
    return MLflow(Path(folder), name)


def wandb(folder: str | Path, name: str = "fedblend") -> Tracker:
    """A tracker that writes offline runs of Weights & Biases to a folder.

    Args:
        folder: of the runs; ``wandb sync`` uploads what is in it.
        name: of the project.
    """
    return WandB(Path(folder), name)


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, str], str], Tracker]] = {
    "tensorboard": lambda folder, name, params, config: TensorBoard(folder, config),
    "mlflow": lambda folder, name, params, config: MLflow(folder, name, params),
    "wandb": lambda folder, name, params, config: WandB(folder, name, params),
}
"""The trackers of a run folder, by name."""


def follow(
    run: Run, *trackers: Tracker, seeds: Sequence[int] | None = None
) -> Iterator[Any]:
    """Go through a run, record by record, and have trackers write them.

    Args:
        run: a simulation, which goes on from where it is.
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


class FolderTrackers:
    """Trackers of a run folder, each in a folder of its own inside.

    Args:
        names: of ``TRACKERS``.
        path: the folder of the run; it may not exist yet.
        name: of the run.
        tables: its configuration as nested tables, and as TOML.
    """

    def __init__(
        self,
        names: Sequence[str],
        path: Path,
        name: str,
        tables: tuple[Mapping[str, Any], str],
    ):
        for one in names:
            if one not in TRACKERS:
                raise UserError("tracker", one, f"one of {', '.join(TRACKERS)}")
        self._folder, params = Folder(path), dict(_flat(tables[0]))
        self._trackers = [
            TRACKERS[one](path / one, name, params, tables[1])
            for one in dict.fromkeys(names)
        ]

    def update(self) -> None:
        """Write the rows that the run has by now."""
        if self._trackers and self._folder.metrics.is_file():
            rows = run_folder.read_rows(self._folder)
            for tracker in self._trackers:
                tracker.update(rows)

    def close(self) -> None:
        """Finish what was written."""
        for tracker in self._trackers:
            tracker.close()


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The keys of nested tables, such as ``run.rounds``, and their values as texts."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", str(value)

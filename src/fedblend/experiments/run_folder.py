# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is in it, how it is written and read.

::

    config.toml        the configuration as run, every default explicit
    run.json           versions, device, hashes of data and partition, the task
    metrics.jsonl      a row after every block of rounds, and for every seed
    summary.json       the end, with harmed clients and costs
    clients.csv        every client's rows, bits, measures, norm of its own model, and
                       local_rounds, how long it trained alone
    harm.csv           who gains by the personal model, and who is harmed
    model.safetensors  the shared model, one file a seed where there are several
    checkpoint         to go on from; local_checkpoint is of training alone, and
                       trial_checkpoint of the trial of how long that should be
    states             client states, where they are kept on disk; likewise
    figures            curves as PNG and SVG

Every file is written beside its place and moved there, so that it is whole or absent.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend import trees
from fedblend.config.schema.table import RunError
from fedblend.core import PyTree
from fedblend.data.federated import FederatedData
from fedblend.simulation.checkpoint import write_atomically
from fedblend.simulation.personalize import NewClients
from fedblend.simulation.result import Results
from fedblend.simulation.serialize import pack


class Folder(NamedTuple):
    """The places in the folder of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration as run."""
        return self.path / "config.toml"

    @property
    def origin(self) -> Path:
        """Versions and hashes."""
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        """A row for each block and seed."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """How it ended; absent while the run is not finished."""
        return self.path / "summary.json"

    @property
    def clients(self) -> Path:
        """The clients at the end."""
        return self.path / "clients.csv"

    @property
    def harm(self) -> Path:
        """Who gains and who is harmed."""
        return self.path / "harm.csv"

    @property
    def figures(self) -> Path:
        """Curves."""
        return self.path / "figures"

    def checkpoint(self, stage: str) -> Path:
        """The checkpoint of a stage: "trial", "local" or "federated"."""
        before = "" if stage == "federated" else f"{stage}_"
        return self.path / f"{before}checkpoint"

    def states(self, stage: str) -> Path:
        """Client states on disk of a stage."""
        return self.path / ("states" if stage == "federated" else f"{stage}_states")

    def model(self, seed: int | None) -> Path:
        """The shared model, of one of several seeds."""
        suffix = "" if seed is None else f"-seed{seed}"
        return self.path / f"model{suffix}.safetensors"


def as_json(value: Any, indent: int | None = 2) -> str:
    """JSON text that every reader takes: what is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_text(path: Path, text: str) -> None:
    """Put a text in its place, whole."""
    write_atomically(path, text.encode())


def rows(run: Results, seeds: list[int]) -> list[dict[str, Any]]:
    """The records as rows; on each a seed's name, and how long clients train alone."""
    found = []
    known = {} if run.alone is None else {"alone": run.alone}
    for record in run.records:
        replicas = [record] if run.replicas is None else record
        for seed, one in zip(seeds, replicas, strict=True):
            found.append({"seed": seed, **one.row(), **known})
    return found


def write_metrics(folder: Folder, run: Results, seeds: list[int]) -> None:
    """All rows so far."""
    lines = [as_json(row, indent=None) for row in rows(run, seeds)]
    write_text(folder.metrics, "".join(f"{line}\n" for line in lines))


def models(run: Results) -> list[PyTree]:
    """The shared model of every seed."""
    if run.replicas is None:
        return [run.shared]
    return [trees.take(run.shared, replica) for replica in range(run.replicas)]


def write_models(folder: Folder, run: Results, seeds: list[int]) -> None:
    """The shared model of every seed."""
    for seed, model in zip(seeds, models(run), strict=True):
        path = folder.model(None if run.replicas is None else seed)
        words = {"format": "fedblend", "seed": str(seed), "round": str(run.round)}
        write_atomically(path, pack(model, words))


def write_clients(
    folder: Folder,
    run: Results,
    seeds: list[int],
    own: Mapping[str, np.ndarray],
    joined: Sequence[NewClients] = (),
) -> None:
    """Every client's rows, bits and measures.

    ``own`` are further columns, arrays over the measured clients and over seeds where
    there are several; ``joined`` are the clients that nobody had seen, for each seed.
    """
    places = {int(client): place for place, client in enumerate(run.measured_ids)}
    columns: list[str] = []
    lines, measured_of = [], run.evidence.measured
    for replica, seed in enumerate(seeds):
        measured = _columns(measured_of[replica]) if measured_of else {}
        for name, values in own.items():
            measured[name] = values if run.replicas is None else values[:, replica]
        columns = list(measured)
        sent, seen = run.bits(replica), run.federated_data
        for client in range(seen.clients):
            bits = [int(sent.up[client]), int(sent.down[client])]
            values = _line(measured, columns, places.get(client))
            known = ["seen"] if joined else []
            lines.append([seed, *_who(seen, client), *bits, *values, *known])
        for newcomers in joined[replica : replica + 1]:
            found, unseen = _columns(newcomers.measured), newcomers.federated_data
            for client in range(unseen.clients):
                _, *facts = _who(unseen, client)
                values = _line(found, columns, client)
                id = seen.clients + client
                lines.append([seed, id, *facts, 0, 0, *values, "unseen"])
    head = ["seed", "id", "name", "train", "validation", "test", "bits_up", "bits_down"]
    columns = [*head, *columns, *(["training"] if joined else [])]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *lines])
    write_text(folder.clients, text.getvalue())


def _who(federated_data: FederatedData, client: int) -> list[Any]:
    """Id, name, and rows in each split of a client."""
    splits = (federated_data.train, federated_data.validation, federated_data.test)
    counts = [0 if split is None else int(split.counts[client]) for split in splits]
    return [client, federated_data.name(client), *counts]


def _line(
    measured: Mapping[str, np.ndarray], columns: list[str], place: int | None
) -> list[Any]:
    """A client's values in these columns; empty where there is none."""
    found = [
        float(measured[name][place]) if place is not None and name in measured else None
        for name in columns
    ]
    return ["" if value is None or np.isnan(value) else value for value in found]


def _columns(measured: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        f"{split}_{model}_{metric}": values
        for split, by_model in measured.items()
        for model, by_metric in by_model.items()
        for metric, values in by_metric.items()
    }


def read_rows(folder: Folder) -> list[dict[str, Any]]:
    """The rows of a run, finished or not."""
    lines = _text(folder.metrics).splitlines()
    return [_parsed(line, folder.metrics) for line in lines]


def read_json(path: Path) -> dict[str, Any]:
    """What one of the JSON files holds."""
    return _parsed(_text(path), path)


def read_summary(folder: Folder) -> dict[str, Any]:
    """How a finished run ended."""
    found = read_json(folder.summary)
    if not found.get("runs"):
        raise RunError(f"{folder.summary}: is damaged: it has no runs")
    if not isinstance(found.get("warnings", []), list):
        raise RunError(f"{folder.summary}: is damaged: warnings are no list")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RunError(f"{path}: is damaged: it is not text") from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise RunError(f"{path}: is damaged: it is not valid JSON") from None
    if not isinstance(found, dict):
        raise RunError(f"{path}: is damaged: a JSON object is expected")
    return found

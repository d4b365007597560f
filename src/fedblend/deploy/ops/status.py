# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The status of an experiment, from its folder alone: no server is asked."""

from pathlib import Path
from typing import Any, NamedTuple

from fedblend.config.config import load
from fedblend.deploy.ops.audit import entries
from fedblend.deploy.ops.settings import NodeSettings, load_as
from fedblend.deploy.server.experiment import read_progress
from fedblend.deploy.server.run import reason_of_stop
from fedblend.errors import RunError
from fedblend.experiments import run_folder
from fedblend.experiments.run_folder import Folder
from fedblend.report.measures import shown_metrics, shown_splits

AUDIT = "audit.jsonl"
COUNTS = ("received", "dropped", "rejected")


class Status(NamedTuple):
    """How far an experiment is."""

    name: str
    round: int
    rounds: int
    state: str
    counts: dict[str, int]
    """Replies of all measured rounds, by what became of them."""
    last_round: str
    """The audit's line of the round that was counted last."""
    measures: list[str]
    """A line for each model, of the newest measurement."""

    def lines(self) -> list[str]:
        """As lines of text."""
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items())
        return [
            f"experiment {self.name}: round {self.round} of {self.rounds}, "
            f"{self.state}",
            f"replies until the newest measurement: {counts}",
            *([self.last_round] if self.last_round else []),
            *self.measures,
        ]


def status_of(path: Path) -> Status:
    """The status of the experiment in a folder.

    Raises:
        RunError: there is none.
    """
    folder = Folder(path)
    if not folder.config.exists():
        raise RunError(f"{path}: is not the folder of an experiment (no config.toml)")
    config, (round, _) = load(folder.config), read_progress(path / "server")
    rows = run_folder.read_rows(folder) if folder.metrics.exists() else []
    reason = reason_of_stop(path)
    state = "running, or waiting to go on" if reason is None else f"stopped: {reason}"
    return Status(
        name=config.name,
        round=round,
        rounds=config.run.rounds,
        state="finished" if folder.summary.exists() else state,
        counts={name: sum(row[name] for row in rows) for name in COUNTS},
        last_round=_last_round(path / AUDIT),
        measures=_measures(rows[-1]) if rows else [],
    )


def audit_of(path: Path) -> Path:
    """The audit of an experiment's folder, of a node.toml, or the file itself."""
    if path.is_dir():
        return path / AUDIT
    return (
        load_as(NodeSettings, path).folder / AUDIT if path.suffix == ".toml" else path
    )


def audit_lines(path: Path) -> list[str]:
    """An audit in readable lines, the newest last."""
    return [_readable(entry) for entry in entries(path)]


def _readable(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "(a line that is not as it was written)"
    fields = ", ".join(f"{k} {v}" for k, v in entry["fields"].items() if v != "")
    at = str(entry["time"]).replace("T", " ")[:19]
    return f"{at}  {entry['event']}" + (f": {fields}" if fields else "")


def _last_round(path: Path) -> str:
    if not path.exists():
        return ""
    rounds = [entry for entry in entries(path) if entry and entry["event"] == "round"]
    return _readable(rounds[-1]) if rounds else ""


def _measures(row: dict[str, Any]) -> list[str]:
    """The first split and metric, each model's mean and worst client."""
    lines = []
    for split in shown_splits([row])[:1]:
        metric = shown_metrics([row], split)[0]
        for model, measured in row["measures"][split].items():
            if metric in measured:
                values = measured[metric]
                lines.append(
                    f"round {row['round']}, {split} {metric} of {model} models: "
                    f"{values['mean']:.3f}, the worst node {values['worst']:.3f} "
                    f"({values['clients']} nodes)"
                )
    return lines

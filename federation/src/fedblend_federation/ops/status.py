# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The status of an experiment, from its folder alone: no server is asked."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.config.config import load
from fedblend.errors import RunError
from fedblend.report.measures import shown_metrics, shown_splits
from fedblend.runs import run_folder
from fedblend.runs.run_folder import Folder
from fedblend_federation.ops.audit import entries
from fedblend_federation.ops.settings import client_at
from fedblend_federation.server.experiment import read_progress
from fedblend_federation.server.run import reason_of_stop

AUDIT = "audit.jsonl"
COUNTS = ("received", "dropped", "rejected")
TROUBLES = ("denied", "refused", "rejected", "began without")
"""Events of a server's audit that people should know of while it runs."""


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
    troubles: list[str]
    """Which nodes were denied, refused or rejected since that round, and why."""
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
            *self.troubles,
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
    last, since = _since_last_round(path / AUDIT)
    wrong = [] if folder.summary.exists() else list(dict.fromkeys(troubles(since)))
    return Status(
        name=config.name,
        round=round,
        rounds=config.run.rounds,
        state="finished" if folder.summary.exists() else state,
        counts={name: sum(row[name] for row in rows) for name in COUNTS},
        last_round=last,
        troubles=wrong,
        measures=_measures(rows[-1]) if rows else [],
    )


def audit_of(path: Path, client: int | None = None) -> Path:
    """The audit of an experiment's folder, of a node.toml, or the file itself.

    ``client`` is one of those that the node hosts.
    """
    if path.is_dir():
        return path / AUDIT
    if path.suffix == ".toml":
        return client_at(path, client).folder / AUDIT
    return path


def audit_lines(path: Path) -> list[str]:
    """An audit in readable lines, the newest last."""
    return [_readable(entry) for entry in entries(path)]


def _readable(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "(a line that is not as it was written)"
    fields = ", ".join(f"{k} {v}" for k, v in entry["fields"].items() if v != "")
    at = str(entry["time"]).replace("T", " ")[:19]
    return f"{at}  {entry['event']}" + (f": {fields}" if fields else "")


def troubles(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What went wrong with nodes, by the lines of a server's audit: who, what, why."""
    for entry in found:
        event, fields = entry["event"], entry["fields"]
        if event not in TROUBLES:
            continue
        who = fields.get("node") or f"client {fields.get('client')}"
        if event == "began without":
            who = f"clients {fields.get('clients')}"
            yield f"the experiment began without {who}: they did not join"
        else:
            yield f"{who} {_SAID[event]}: {fields.get('reason')}"


_SAID = {
    "denied": "may not join",
    "refused": "refuses",
    "rejected": "sent what does not count",
}


def _since_last_round(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The line of the round that was counted last, and the entries after it."""
    last, since = "", []
    for entry in entries(path) if path.exists() else ():
        if entry is None:
            continue
        since.append(entry)
        if entry["event"] == "round":
            last, since = _readable(entry), []
    return last, since


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

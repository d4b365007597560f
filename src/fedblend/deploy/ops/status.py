# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How an experiment stands, from its folder alone: no server has to be asked."""

from pathlib import Path
from typing import Any, NamedTuple

from fedblend.config import toml
from fedblend.config.config import check
from fedblend.deploy.ops.audit import entries
from fedblend.deploy.ops.settings import Node, load_as
from fedblend.deploy.server.run import progress, reason_of_stop
from fedblend.errors import RunError
from fedblend.experiments import run_folder
from fedblend.experiments.run_folder import Folder
from fedblend.report.curves import shown_metrics, shown_splits

AUDIT = "audit.jsonl"


class Standing(NamedTuple):
    """How far an experiment is."""

    name: str
    round: int
    rounds: int
    state: str
    received: int
    dropped: int
    rejected: int
    """Answers over all measured rounds."""
    counted: str
    """What the audit says of the round that was counted last."""
    measures: list[str]
    """A line for each model, of the newest measurement."""

    def lines(self) -> list[str]:
        """In words."""
        counts = (
            f"{self.received} received, {self.dropped} dropped, "
            f"{self.rejected} rejected"
        )
        said = [
            f"experiment {self.name}: round {self.round} of {self.rounds}, "
            f"{self.state}",
            f"answers until the newest measurement: {counts}",
        ]
        return [*said, *([self.counted] if self.counted else []), *self.measures]


def standing(path: Path) -> Standing:
    """How the experiment in a folder stands.

    Raises:
        RunError: there is none.
    """
    folder = Folder(path)
    if not folder.config.exists():
        raise RunError(f"{path}: is not the folder of an experiment (no config.toml)")
    config = check(toml.read(folder.config), str(folder.config))
    round, _ = progress(path)
    rows = run_folder.read_rows(folder) if folder.metrics.exists() else []
    totals = {
        name: sum(row[name] for row in rows)
        for name in ("received", "dropped", "rejected")
    }
    return Standing(
        name=config.name,
        round=round,
        rounds=config.run.rounds,
        state=_state(folder),
        **totals,
        counted=_counted(path / AUDIT),
        measures=_measures(rows[-1]) if rows else [],
    )


def log_of(path: Path) -> Path:
    """The audit that belongs to a folder, to a node.toml, or is the file itself."""
    if path.is_dir():
        return path / AUDIT
    return load_as(Node, path).folder / AUDIT if path.suffix == ".toml" else path


def log_lines(path: Path) -> list[str]:
    """An audit in readable lines, the newest last."""
    return [_readable(entry) for entry in entries(path)]


def _readable(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "(a line that is not as it was written)"
    said = ", ".join(f"{k} {v}" for k, v in entry["fields"].items() if v != "")
    at = str(entry["time"]).replace("T", " ")[:19]
    return f"{at}  {entry['event']}" + (f": {said}" if said else "")


def _state(folder: Folder) -> str:
    if folder.summary.exists():
        return "finished"
    reason = reason_of_stop(folder.path)
    return "running, or waiting to go on" if reason is None else f"stopped: {reason}"


def _counted(path: Path) -> str:
    if not path.exists():
        return ""
    counted = [one for one in entries(path) if one and one["event"] == "counted"]
    return _readable(counted[-1]) if counted else ""


def _measures(row: dict[str, Any]) -> list[str]:
    """The first split and metric, each model's mean and worst client."""
    said = []
    for split in shown_splits([row])[:1]:
        metric = shown_metrics([row], split)[0]
        for model, measured in row["measures"][split].items():
            if metric in measured:
                values = measured[metric]
                said.append(
                    f"round {row['round']}, {split} {metric} of {model} models: "
                    f"{values['mean']:.3f}, the worst node {values['worst']:.3f} "
                    f"({values['clients']} nodes)"
                )
    return said

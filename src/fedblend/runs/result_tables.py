# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The results of several run folders as tidy tables: one row for each measurement."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.data.dataset import require
from fedblend.errors import RunError
from fedblend.report.measures import shown_splits, value_at
from fedblend.runs import run_folder
from fedblend.runs.paired import Difference
from fedblend.runs.run_folder import Folder
from fedblend.simulation.io.serialize import write_atomically

Rows = list[dict[str, Any]]
Keys = Mapping[str, Mapping[str, Any]]
"""By run: further columns, such as the value of a swept key."""


class Target(NamedTuple):
    """A value of a metric that a run is to reach."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """``accuracy=0.9`` as a target."""
        metric, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not equals or not metric or abs(value) == float("inf") or value != value:
            raise RunError(
                f"--target: {text!r} is not METRIC=NUMBER, such as accuracy=0.9"
            )
        return cls(metric.strip(), value)


def results(folders: Mapping[str, Path], keys: Keys) -> Rows:
    """A row for each run, seed, split, model and metric, at the end of the run."""
    rows = []
    for name, path in folders.items():
        summary = run_folder.read_summary(Folder(path))
        for one in summary["runs"]:
            first = {"run": name, "algorithm": summary["algorithm"], **keys[name]}
            first |= {"seed": one["seed"], "round": one["round"]}
            first |= {f"bits_{way}": one["bits"][way] for way in ("up", "down")}
            for split, models in one["measures"].items():
                for model, metrics in models.items():
                    for metric, spread in metrics.items():
                        place = {"split": split, "model": model, "metric": metric}
                        rows.append({**first, **place, **spread})
    return rows


def clients(folders: Mapping[str, Path], keys: Keys) -> Rows:
    """A row for each run, seed and client, with all columns of ``clients.csv``."""
    rows = []
    for name, path in folders.items():
        with open(Folder(path).clients, newline="") as file:
            for row in csv.DictReader(file):
                own = {key: _number(key, value) for key, value in row.items()}
                rows.append({"run": name, **keys[name], **own})
    return rows


def _number(key: str, text: str) -> Any:
    if key in ("name", "training"):
        return text
    if key in ("seed", "id", "train", "validation", "test", "bits_up", "bits_down"):
        return int(text)
    return float(text) if text else None


def to_target(
    folders: Mapping[str, Path],
    keys: Keys,
    target: Target,
    higher_is_better: bool,
) -> Rows:
    """A row for each run and seed: the rounds and bits to reach a target, or none.

    Personal models count, by their mean over clients on the split that is shown. A run
    is measured after every block of rounds, so the number is that of a block's end.
    """
    sign = 1 if higher_is_better else -1
    found = []
    for name, path in folders.items():
        rows = run_folder.read_rows(Folder(path))
        split = shown_splits(rows)[0]
        place = ("measures", split, "personal", target.metric, "mean")
        for seed in dict.fromkeys(row["seed"] for row in rows):
            own = [row for row in rows if row["seed"] == seed]
            there = [
                row for row in own if sign * (value_at(row, *place) - target.value) >= 0
            ]
            at = there[0] if there else {}
            found.append(
                {"run": name, **keys[name], "seed": seed}
                | {"split": split, "metric": target.metric, "target": target.value}
                | {"reached": bool(there)}
                | {key: at.get(key) for key in ("round", "bits_up", "bits_down")}
            )
    return found


def of_clients(found: Sequence[Difference], names: Mapping[int, str]) -> Rows:
    """A row for each difference and client: its gain and the ends of the interval."""
    return [
        {
            "run": one.name,
            "other": one.other,
            "split": one.split,
            "metric": one.metric,
            "id": int(client),
            "name": names.get(int(client), ""),
            "gain": float(one.gain.value[place]),
            "low": float(one.gain.low[place]),
            "high": float(one.gain.high[place]),
        }
        for one in found
        for place, client in enumerate(one.ids)
    ]


def write(stem: Path, rows: Rows) -> None:
    """Write a table as CSV and as Parquet, whole; nothing where there are no rows."""
    if not rows:
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    whole = [{key: _known(row.get(key)) for key in columns} for row in rows]
    run_folder.write_table(stem.with_suffix(".csv"), whole)
    pyarrow = require("pyarrow", "parquet")
    parquet = require("pyarrow.parquet", "parquet")
    buffer = pyarrow.BufferOutputStream()
    by_column = {key: [row[key] for row in whole] for key in columns}
    parquet.write_table(pyarrow.table(by_column), buffer)
    write_atomically(stem.with_suffix(".parquet"), buffer.getvalue().to_pybytes())


def _known(value: Any) -> Any:
    """NaN as an empty cell; infinity stays, it is an open end of an interval."""
    return None if isinstance(value, float) and value != value else value

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One run of a page: its results, costs and configuration as plain values."""

import math
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.errors import RunError
from fedblend.report import measures
from fedblend.report import verdict as words
from fedblend.report.clients import ClientColumns, plain_clients, read_clients
from fedblend.report.measures import Row
from fedblend.report.series import higher_is_better, learning_curves, number
from fedblend.runs.run_folder import Folder, read_json, read_rows, read_summary

DAMAGED = (KeyError, TypeError, AttributeError, IndexError, ValueError)

Plain = dict[str, Any]


class RunFiles(NamedTuple):
    """What the files of a run folder hold."""

    folder: Folder
    text: str
    config: Plain
    rows: list[Row]
    summary: Plain | None
    """None while the run is not finished."""
    origin: Plain
    clients: ClientColumns | None
    preprocessing: Plain

    @property
    def ends(self) -> list[Plain]:
        """The end of each seed; of an unfinished run its last rows."""
        last = {row.get("seed"): row for row in self.rows}
        return self.summary["runs"] if self.summary else list(last.values())


def read_run(path: Path) -> RunFiles:
    """Read the folder of a run, finished or not.

    Raises:
        RunError: this is not the folder of a run, or a file is damaged.
    """
    folder = Folder(path)
    if not folder.config.is_file():
        raise RunError(f"{path}: is not the folder of a run (no config.toml)")
    try:
        text = folder.config.read_text()
        config = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise RunError(f"{folder.config}: is damaged: it is not TOML") from None
    finished = folder.summary.is_file()
    return RunFiles(
        folder,
        text,
        config,
        read_rows(folder) if folder.metrics.is_file() else [],
        read_summary(folder) if finished else None,
        read_json(folder.origin) if folder.origin.is_file() else {},
        read_clients(folder) if finished else None,
        _preprocessing(path),
    )


def _preprocessing(path: Path) -> Plain:
    """What was done to the columns of a table: of the first split."""
    files = [path / "preprocessing.json", *sorted(path.glob("preprocessing-*.json"))]
    return next((read_json(file) for file in files if file.is_file()), {})


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs, where a folder that holds ``runs`` stands for those."""
    found: list[Path] = []
    for path in paths:
        inner = sorted(path.glob("runs/*/config.toml"))
        is_run = (path / "metrics.jsonl").is_file() or not inner
        found += [path] if is_run else [file.parent for file in inner]
    return found


@contextmanager
def refuse_damage(run: RunFiles) -> Iterator[None]:
    """Results of a run that do not fit, inside, are damage: one line."""
    try:
        yield
    except DAMAGED:
        raise RunError(f"{run.folder.path}: its results are damaged") from None


ENVIRONMENT = ("fedblend", "jax", "numpy", "python", "device")
SPREAD = ("mean", "weighted", "std", "worst_tenth", "worst")
"""Statistics over clients in the table of a run, as in the terminal."""


def describe_run(run: RunFiles, label: str) -> Plain:
    """What the page of a run and that of one of its clients have in common."""
    with refuse_damage(run):
        ends = run.ends
        splits = measures.main_splits(ends)
        first = measures.list_metrics(ends, splits[0]) if splits else []
        alone = ends[0].get("alone") if ends else None
        return {
            "label": label,
            "algorithm": str(run.config.get("algorithm", {}).get("name", "")),
            "rounds": run.config.get("run", {}).get("rounds"),
            "seeds": [one.get("seed", 0) for one in ends],
            "splits": list(dict.fromkeys([*splits, *_end_measures(ends)])),
            "metrics": _metrics(ends, first),
            "alone": measures.training_alone(alone) if alone else None,
            "privacy": ((run.summary or {}).get("privacy") or {}).get("sentence"),
        }


def run_results(
    run: RunFiles, about: Plain, head: words.Headline | None, points: int, cells: int
) -> Plain:
    """One run of a page.

    Args:
        run: its files.
        about: from ``describe_run``.
        head: the numbers of its verdict.
        points: of a curve, at most.
        cells: of the table of clients, at most.
    """
    with refuse_damage(run):
        ends, summary = run.ends, run.summary or {}
        names = [one["name"] for one in about["metrics"]]
        first = [
            f"{split}_{model}_{name}"
            for split in about["splits"][:1]
            for model in measures.MODELS
            for name in names
        ]
        return about | {
            "folder": str(run.folder.path),
            "finished": run.summary is not None,
            "settings": _numbers(run.config),
            "headline": None if head is None else _headline(head),
            "ends": _ends(ends),
            "curves": learning_curves(run.rows, points),
            "costs": [_costs(one) for one in ends] if run.summary else [],
            "central": [one["central"] for one in ends if "central" in one],
            "unseen": [_ends([one["unseen"]]) for one in ends if "unseen" in one],
            "alpha": summary.get("alpha"),
            "warnings": summary.get("warnings", []),
            "clients": plain_clients(run.clients, cells, first)
            if run.clients
            else None,
            "config": run.text,
            "environment": {
                name: run.origin[name] for name in ENVIRONMENT if name in run.origin
            },
            "data": run.origin.get("data", {}),
            "columns": _columns(run.preprocessing),
        }


def _columns(preprocessing: Plain) -> list[Plain]:
    """What was done to every column of a raw table."""
    return [
        {key: str(column.get(key, "")) for key in ("name", "kind", "seen", "done")}
        for column in preprocessing.get("columns", ())
    ]


def _end_measures(ends: list[Plain]) -> Plain:
    """What was measured, by split, model and metric."""
    return ends[0]["measures"] if ends else {}


def _metrics(ends: list[Plain], first: list[str]) -> list[Plain]:
    """The metrics of a run, these first, with the way each is better."""
    spreads = {
        metric: spread
        for models in _end_measures(ends).values()
        for by_metric in models.values()
        for metric, spread in by_metric.items()
    }
    return [
        {
            "name": name,
            "words": words.name_of(name),
            "higher": higher_is_better(spreads[name], name),
            "share": name.partition("@")[0] in words.SHARES,
        }
        for name in dict.fromkeys([*first, *spreads])
    ]


def _headline(head: words.Headline) -> Plain:
    gain = None if head.gain is None else head.gain._asdict()
    return {
        **head._asdict(),
        "models": {model: number(value) for model, value in head.models.items()},
        "gain": gain and {name: number(value) for name, value in gain.items()},
    }


def _ends(ends: list[Plain]) -> list[Plain]:
    """The last measures: a line for split, model, metric and statistic, by seed."""
    return [
        {"split": split, "model": model, "metric": metric}
        | {
            of: [_exact(measures.value_at(one, *path, of)) for one in ends]
            for of in SPREAD
            for path in [("measures", split, model, metric)]
        }
        for split, models in _end_measures(ends).items()
        for model, by_metric in models.items()
        for metric in by_metric
    ]


def _exact(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _costs(one: Plain) -> Plain:
    """Bits, answers and seconds of one seed."""
    bits = one.get("bits") or {}
    names = ("seconds", "compile_seconds", "received", "dropped", "rejected", "cohort")
    return {
        "seed": one.get("seed", 0),
        **{name: number(one[name]) for name in names if one.get(name) is not None},
        **{f"bits_{link}": bits.get(link) for link in ("up", "down")},
        **{
            f"bits_{link}_each": bits.get(f"{link}_per_client")
            for link in ("up", "down")
        },
        "alone_seconds": number((one.get("alone") or {}).get("seconds")),
    }


def _numbers(config: Plain, start: str = "") -> Plain:
    """The numbers of a configuration by key, to find what a sweep varies."""
    found: Plain = {}
    for key, value in config.items():
        name = f"{start}{key}"
        if isinstance(value, dict):
            found |= _numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found

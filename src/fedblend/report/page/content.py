# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a page holds, as plain values; everything comes from run folders."""

import math
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedblend.errors import RunError
from fedblend.experiments.differences import differences
from fedblend.experiments.run_folder import Folder, read_json, read_rows, read_summary
from fedblend.report import measures
from fedblend.report.page import verdict as words
from fedblend.report.page.clients import (
    STATUS,
    Clients,
    as_plain,
    one_client,
    read_clients,
    taken,
)
from fedblend.report.page.columns import number
from fedblend.report.page.curves import (
    MOST_POINTS,
    higher_is_better,
    learning_curves,
)

MOST_CELLS = 900_000
"""Cells of all tables of clients on a page; further columns are left out."""
MOST_CURVE_POINTS = 6_000
"""Points of a curve times runs, so that a long sweep stays small."""
MOST_TESTS = 300_000
"""Clients times pairs of runs that are tested while a page is made."""
ENVIRONMENT = ("fedblend", "jax", "numpy", "python", "device")
SPREAD = ("mean", "weighted", "std", "worst_tenth", "worst")
"""Statistics over clients in the table of a run, as in the terminal."""
DAMAGED = (KeyError, TypeError, AttributeError, IndexError, ValueError)

Plain = dict[str, Any]
Made = TypeVar("Made")


class RunFiles(NamedTuple):
    """What the files of a run folder hold."""

    folder: Folder
    text: str
    config: Plain
    rows: list[measures.Row]
    summary: Plain | None
    """None while the run is not finished."""
    origin: Plain
    clients: Clients | None
    preprocessing: Plain


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


def page_content(
    paths: Sequence[Path], verdict: Sequence[str] = (), live: bool = False
) -> Plain:
    """The content of a page about runs.

    Args:
        paths: folders of runs.
        verdict: sentences to show on top instead of those from the summaries.
        live: the page asks for new content while the run goes on.
    """
    runs = [read_run(path) for path in run_folders(paths)]
    if not runs:
        raise RunError("no run to report: name the folder of at least one")
    labels = _labels(runs)
    points = min(MOST_POINTS, max(MOST_CURVE_POINTS // len(runs), 50))
    room = MOST_CELLS // len(runs)
    plain = [
        _checked(run, partial(_run, label=label, points=points, cells=room))
        for run, label in zip(runs, labels, strict=True)
    ]
    pairs, untested = _differences(runs, labels)
    tone, lines = _verdict(runs, labels, pairs)
    return {
        "title": runs[0].config.get("name", "run") if len(runs) == 1 else "Comparison",
        "live": live,
        "tone": tone,
        "verdict": list(verdict) or lines,
        "status": STATUS,
        "differences": pairs,
        "untested": untested,
        "runs": plain,
    }


def _differences(
    runs: Sequence[RunFiles], labels: Sequence[str]
) -> tuple[list[Plain], str | None]:
    """All pairs of runs and training alone, tested; or why there is no test."""
    count = len(runs) * (len(runs) + 1) // 2
    if len(runs) < 2 or any(run.summary is None for run in runs):
        return [], None
    if (
        count * max(len(run.clients.ids) if run.clients else 0 for run in runs)
        > MOST_TESTS
    ):
        return [], "these are too many runs and clients to test on a page"
    folders = {label: run.folder.path for label, run in zip(labels, runs, strict=True)}
    try:
        pairs = [one.row() for one in differences(folders)]
    except RunError as error:
        return [], str(error)
    return [{key: _plain(value) for key, value in pair.items()} for pair in pairs], None


def _plain(value: Any) -> Any:
    return number(value) if isinstance(value, float) else value


def _checked(run: RunFiles, make: Callable[[RunFiles], Made]) -> Made:
    try:
        return make(run)
    except DAMAGED:
        raise RunError(f"{run.folder.path}: its results are damaged") from None


def _labels(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run that no other has."""
    names = [str(run.config.get("name", run.folder.path.name)) for run in runs]
    if len(set(names)) < len(names):
        names = [run.folder.path.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder.path) for run in runs]
    return names


def _verdict(
    runs: list[RunFiles], labels: list[str], pairs: list[Plain]
) -> tuple[str, list[str]]:
    if len(runs) == 1:
        return _checked(runs[0], lambda run: words.sentences(run.summary, run.clients))
    heads = {
        label: head
        for label, run in zip(labels, runs, strict=True)
        if run.summary
        and (head := _checked(run, lambda run: words.headline(run.summary)))
    }
    kinds = {(head.split, head.metric) for head in heads.values()}
    if len(kinds) != 1:
        return "open", ["These runs do not measure the same thing."]
    return words.of_several(heads, pairs)


def _run(run: RunFiles, label: str, points: int, cells: int) -> Plain:
    """One run of a page."""
    ends = run.summary["runs"] if run.summary else _last_rows(run.rows)
    splits = measures.shown_splits(ends)
    metrics = measures.shown_metrics(ends, splits[0]) if splits else []
    algorithm = run.config.get("algorithm", {})
    summary = run.summary or {}
    head = words.headline(summary) if run.summary else None
    first = [f"{splits[0]}_{of}_{m}" for of in measures.MODELS for m in metrics]
    return {
        "label": label,
        "folder": str(run.folder.path),
        "finished": run.summary is not None,
        "algorithm": str(algorithm.get("name", "")),
        "rounds": run.config.get("run", {}).get("rounds"),
        "seeds": [one.get("seed", 0) for one in ends],
        "settings": _numbers(run.config),
        "splits": [*splits, *(s for s in _measured(ends) if s not in splits)],
        "metrics": _metrics(ends, metrics),
        "headline": None if head is None else _headline(head),
        "ends": _ends(ends),
        "curves": learning_curves(run.rows, points),
        "costs": [_costs(one) for one in ends] if run.summary else [],
        "alone": _alone(ends),
        "central": [one["central"] for one in ends if "central" in one],
        "unseen": [_ends([one["unseen"]]) for one in ends if "unseen" in one],
        "theory": summary.get("theory"),
        "privacy": (summary.get("privacy") or {}).get("sentence"),
        "alpha": summary.get("alpha"),
        "warnings": summary.get("warnings", []),
        "clients": as_plain(run.clients, cells, first) if run.clients else None,
        "config": run.text,
        "environment": {
            name: run.origin[name] for name in ENVIRONMENT if name in run.origin
        },
        "data": run.origin.get("data", {}),
        "preprocessing": run.preprocessing,
    }


def _last_rows(rows: list[measures.Row]) -> list[measures.Row]:
    return list({row.get("seed"): row for row in rows}.values())


def _measured(ends: list[Plain]) -> list[str]:
    return list(ends[0]["measures"]) if ends else []


def _metrics(ends: list[Plain], first: list[str]) -> list[Plain]:
    """The metrics of a run, the main one first, with the way each is better."""
    spreads = {
        metric: spread
        for models in (ends[0]["measures"] if ends else {}).values()
        for by_metric in models.values()
        for metric, spread in by_metric.items()
    }
    order = [*first, *(name for name in spreads if name not in first)]
    return [
        {
            "name": name,
            "words": words.name_of(name),
            "higher": higher_is_better(spreads[name], name),
            "share": name.partition("@")[0] in words.SHARES,
        }
        for name in order
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
        for split, models in (ends[0]["measures"] if ends else {}).items()
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


def _alone(ends: list[Plain]) -> str | None:
    alone = ends[0].get("alone") if ends else None
    return None if not alone else measures.training_alone(alone)


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


def client_content(path: Path, client: str) -> Plain:
    """The content of the page for one client: nothing of the other clients.

    Means over clients are left out as well: those of two clients tell the other's.

    Args:
        path: the folder of a finished run.
        client: its id or name.
    """
    run = read_run(path)
    if run.summary is None or run.clients is None:
        raise RunError(f"{path}: this run is not finished; --resume continues it")
    place = one_client(run.clients, client, str(path))
    own = taken(run.clients, np.array([place]))
    client_id = str(own.ids[0])
    tone, lines = _checked(run, lambda run: words.of_client(own, 0))
    ends = run.summary["runs"]
    splits = measures.shown_splits(ends)
    first = measures.shown_metrics(ends, splits[0]) if splits else []
    return {
        "title": own.names[0] if own.names[0] != client_id else f"Client {client_id}",
        "live": False,
        "tone": tone,
        "verdict": lines,
        "status": STATUS,
        "only": True,
        "runs": [
            {
                "label": run.config.get("name", ""),
                "algorithm": str(run.config.get("algorithm", {}).get("name", "")),
                "rounds": run.config.get("run", {}).get("rounds"),
                "seeds": [one.get("seed", 0) for one in ends],
                "splits": [*splits, *(s for s in _measured(ends) if s not in splits)],
                "metrics": _metrics(ends, first),
                "alone": _alone(ends),
                "privacy": (run.summary.get("privacy") or {}).get("sentence"),
                "clients": as_plain(own, MOST_CELLS, ()),
            }
        ],
    }

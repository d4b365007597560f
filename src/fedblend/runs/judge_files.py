# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Scores of methods from the files of any library.

- A table (.csv, .tsv) or a frame: columns method, client, seed, score. Without a column
  of clients there is one client; without seeds, repeated rows are repeated runs.
- NVFlare's ``results.tsv`` of an automatic search: the method is the description of a
  row, the baseline the first row or the one with the status "baseline"; rows without a
  score count as candidates that were tried.
- Flower's history as JSON, one file for each run, ``METHOD-SEED.json``: the last round
  of the metric that ``score`` names, distributed before centralized.
- PFLlib's results, one file for each run, ``DATASET_METHOD_GOAL_SEED.h5``: the last
  round of the accuracy or the AUC, which is one number for all clients.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.errors import RunError, hint
from fedblend.runs.run_folder import read_json, read_table

NVFLARE = {"commit", "score", "status", "description"}
"""Columns by which a table of NVFlare's is known."""
RUN_NAME = re.compile(r"(?P<method>.+?)[-_.](?:seed)?[-_]?(?P<seed>\d+)")
FLOWER = ("distributed", "centralized"), ("clientapp", "serverapp")
"""Where values come from, in Flower's History and in its later Result."""
PFLLIB = {"accuracy": "rs_test_acc", "auc": "rs_test_auc"}
"""Series in PFLlib's files, by the metric that ``score`` names."""


class Columns(NamedTuple):
    """Names of columns; None is the usual one, which may be absent for client, seed."""

    method: str | None = None
    client: str | None = None
    seed: str | None = None
    score: str | None = None


class Scores(NamedTuple):
    """The scores of methods, by seed and client."""

    where: str
    values: dict[str, dict[tuple[str, str], float]]
    baseline: str | None = None
    """The baseline, where the files tell."""
    tried: int = 0
    """Methods that were tried, also those without a score."""


Row = Mapping[str, Any]


def read_scores(source: Any, columns: Columns) -> Scores:
    """The scores of files, a frame, or a mapping from names to columns."""
    if isinstance(source, str | Path):
        source = [source]
    if isinstance(source, Sequence):
        paths = [Path(path) for path in source]
        kinds = {path.suffix for path in paths}
        for kind, read in {".json": _flower_rows, ".h5": _pfllib_rows}.items():
            if kinds == {kind}:
                rows = [row for path in paths for row in read(path, columns.score)]
                return _table(_where(paths), rows, Columns())
        rows = [row for path in paths for row in _file_rows(path)]
        if rows and rows[0].keys() >= NVFLARE:
            return _nvflare(_where(paths), rows)
        return _table(_where(paths), rows, columns)
    names = list(source.keys() if hasattr(source, "keys") else source.columns)
    each = zip(*(np.asarray(source[name]).tolist() for name in names), strict=True)
    return _table(
        "scores", [dict(zip(names, row, strict=True)) for row in each], columns
    )


def _where(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _file_rows(path: Path) -> Sequence[Row]:
    if path.suffix not in (".csv", ".tsv"):
        raise RunError(
            f"{path}: is neither a table (.csv, .tsv) nor a history (.json, .h5) among "
            "files of one kind"
        )
    return read_table(path, "\t" if path.suffix == ".tsv" else ",")


def _table(where: str, rows: Sequence[Row], columns: Columns) -> Scores:
    if not rows:
        raise RunError(f"{where}: has no rows")
    names = {}
    for key, asked in columns._asdict().items():
        names[key] = asked or key
        missing = names[key] not in rows[0]
        if missing and (asked or key in ("method", "score")):
            known = f"there are {', '.join(map(str, rows[0]))}"
            raise RunError(f"{where}: has no column {names[key]!r}; {known}")
    values: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        own = values.setdefault(str(row[names["method"]]), {})
        client = str(row.get(names["client"], ""))
        seed = str(row.get(names["seed"], ""))
        if names["seed"] not in row:
            seed = str(sum(client == other for _, other in own))
        if (seed, client) in own:
            place = f"{row[names['method']]!r}, client {client!r}, seed {seed!r}"
            raise RunError(f"{where}: two scores for method {place}")
        own[seed, client] = _number(row[names["score"]], where)
    return Scores(where, values, tried=len(values))


def _number(text: Any, where: str) -> float:
    """A score; an empty one is not known."""
    try:
        return float(text) if text not in ("", None) else float("nan")
    except (TypeError, ValueError):
        raise RunError(f"{where}: score: {text!r} is not a number") from None


def _nvflare(where: str, rows: Sequence[Row]) -> Scores:
    """Candidates of an automatic search, each with one score for all clients."""
    made = [row for row in rows if row["status"] != "crash" and row["score"]]
    first = [row for row in rows if row["status"] == "baseline"] or made
    found = _table(where, made, Columns(method="description"))
    tried = len({row["description"] for row in rows})
    return found._replace(baseline=first[0]["description"], tried=tried)


def _flower_rows(path: Path, metric: str | None) -> Iterable[Row]:
    """The last values of a history, one for each client it tells apart."""
    named = RUN_NAME.fullmatch(path.stem)
    method, seed = named.groups() if named else (path.stem, "0")
    known = _last_values(read_json(path))
    if metric is None or metric not in known:
        raise RunError(f"{path}: --score: {metric!r}: {hint(metric or '', known)}")
    value = known[metric]
    if not isinstance(value, dict | list):
        value = {"": value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for client, score in pairs:
        yield {"method": method, "seed": seed, "client": client, "score": score}


def _pfllib_rows(path: Path, metric: str | None) -> Iterable[Row]:
    """The last round of a run."""
    if metric not in PFLLIB:
        raise RunError(f"{path}: --score: {metric!r}: {hint(metric or '', PFLLIB)}")
    try:
        _, method, _, seed = path.stem.rsplit("_", 3)
        with import_module("h5py").File(path) as file:
            score = float(file[PFLLIB[metric]][-1])
    except ModuleNotFoundError:
        raise RunError(f"{path}: needs h5py: pip install h5py") from None
    except (OSError, LookupError, ValueError):
        line = "is no file of PFLlib's, such as Cifar10_FedAvg_test_0.h5"
        raise RunError(f"{path}: {line} with {PFLLIB[metric]}") from None
    yield {"method": method, "seed": seed, "score": score}


def _last_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Every metric of a history in its last round."""
    found: dict[str, Any] = {}
    for old, new in zip(*FLOWER, strict=True):
        series = dict(content.get(f"metrics_{old}") or {})
        if content.get(f"losses_{old}"):
            series.setdefault("loss", content[f"losses_{old}"])
        for name, pairs in series.items():
            if pairs:
                found.setdefault(name, max(pairs, key=lambda pair: pair[0])[1])
        rounds = content.get(f"evaluate_metrics_{new}") or {}
        if rounds:
            for name, value in rounds[max(rounds, key=int)].items():
                found.setdefault(name, value)
    return found

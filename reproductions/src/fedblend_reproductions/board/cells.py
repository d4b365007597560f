# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Cells of the board: one run of a method on a task, as one JSON file.

A cell has a task, a method, a rate, a seed and a number of rounds. It holds these
settings and their hash, the numbers of right rows at every measurement, the rounds that
are chosen from them, and where and with what it was measured. ``check`` finds a cell
whose settings are no longer those of its method and task, or whose numbers do not
follow from its curve.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedblend
from fedblend.data.dataset import DataError
from fedblend_reproductions.board import protocol
from fedblend_reproductions.board.methods import METHODS, Method
from fedblend_reproductions.board.tasks import TASKS, Task
from fedblend_reproductions.claims import commit, device, plain

TUNING_SEED = 1000
"""The seed of the runs that choose a rate; none that is reported."""

Cell = dict[str, Any]
"""A cell as JSON stores it."""


class Place(NamedTuple):
    """What distinguishes a cell from others.

    With a ``patience`` a run has fewer rounds where it stops early, see ``protocol``.
    """

    task: Task
    method: Method
    rounds: int
    rate: float
    seed: int
    patience: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """All that the cell's numbers depend on, as plain values."""
        early = {"patience": self.patience} if self.patience else {}
        return plain(
            {
                "task": self.task.name,
                **self.task.settings,
                "method": self.method.name,
                "options": self.method.options,
                "models": self.method.models,
                "rate": self.rate,
                "rounds": self.rounds,
                "every": self.task.every(self.rounds),
                "seed": self.seed,
                **early,
            }
        )

    def path(self, folder: Path) -> Path:
        """Where the cell is stored."""
        early = f"-patience{self.patience}" if self.patience else ""
        name = f"{self.method.name}-rounds{self.rounds}{early}-rate{self.rate:g}"
        return folder / self.task.name / f"{name}-seed{self.seed}.json"


def digest(value: Any) -> str:
    """The first 16 digits of the sha256 of plain values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def finished(folder: Path, place: Place) -> Cell | None:
    """The stored cell, or None if it is yet to be measured.

    Raises:
        DataError: the file has other settings.
    """
    path = place.path(folder)
    if not path.exists():
        return None
    cell, wanted = read(path), place.settings
    if cell["hash"] != digest(wanted):
        raise DataError(
            f"{path}: was measured with other settings "
            f"({_differing(cell['settings'], wanted)}); delete it, or choose another "
            "--out"
        )
    return cell


def _differing(stored: dict[str, Any], wanted: dict[str, Any]) -> str:
    names = [key for key in wanted if stored.get(key) != wanted[key]]
    return ", ".join(names) or "hash"


def read(path: Path) -> Cell:
    """A cell from its file."""
    return read_json(path, {"hash", "settings", "curve", "chosen", "rows", "digest"})


def read_json(path: Path, needed: set[str]) -> Cell:
    """A file with some keys at least."""
    try:
        cell = json.loads(path.read_text())
        missing = needed - set(cell)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: is not a cell of the board: {error}") from None
    if missing:
        names = ", ".join(sorted(missing))
        raise DataError(f"{path}: is not a cell of the board: no {names}")
    return cell


def make(
    place: Place,
    looks: list[int],
    correct: np.ndarray,
    counts: np.ndarray,
    *,
    seconds: float,
    compile_seconds: float,
) -> Cell:
    """A cell of measured numbers.

    Args:
        place: its task, method, rounds, rate and seed.
        looks: rounds of the measurements.
        correct: right rows, [measurements, 2 halves, clients].
        counts: rows, [2 halves, clients].
        seconds: the cell's share of the time of all replicas.
        compile_seconds: likewise of compiling.
    """
    cell = {
        "settings": place.settings,
        "hash": digest(place.settings),
        **source(),
        "seconds": round(seconds, 2),
        "compile_seconds": round(compile_seconds, 2),
        "rows": counts.tolist(),
        "curve": {"rounds": list(looks), "correct": correct.sum(axis=2).tolist()},
        "chosen": protocol.choose(correct, looks),
    }
    return {**cell, "digest": digest(cell)}


def source() -> dict[str, Any]:
    """Where and with what a cell is measured."""
    versions = {"fedblend": fedblend.__version__, "jax": jax.__version__}
    return {"versions": versions, "commit": commit(), "device": device()}


def write(path: Path, cell: Cell) -> None:
    """Write a cell; renamed when complete, so that no partial file is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(cell, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def all_cells(folder: Path) -> Iterator[tuple[Path, Cell]]:
    """All stored cells, in order of their paths."""
    for path in sorted(folder.glob("*/*-seed*.json")):
        yield path, read(path)


def check(path: Path, cell: Cell) -> list[str]:
    """What is wrong with a stored cell, a line each."""
    stored = cell["settings"]
    task, method = TASKS.get(stored["task"]), METHODS.get(stored["method"])
    if task is None or method is None:
        return [f"{path}: no such task or method: {stored['task']}, {stored['method']}"]
    early = stored.get("patience", 0)
    place = Place(task, method, stored["rounds"], stored["rate"], stored["seed"], early)
    problems = []
    if stored != place.settings:
        names = _differing(stored, place.settings)
        problems.append(f"its settings are not the board's: {names}")
    if digest(stored) != cell["hash"]:
        problems.append("its hash is not that of its settings")
    if path.name != place.path(path).name:
        problems.append("its name is not that of its settings")
    if digest({key: cell[key] for key in cell if key != "digest"}) != cell["digest"]:
        problems.append("it was changed after it was measured")
    curve = np.asarray(cell["curve"]["correct"])[..., None]
    again = protocol.choose(curve, cell["curve"]["rounds"])
    for name, found in cell["chosen"].items():
        same = ("round", "score")
        followed = all(found[key] == again[name][key] for key in same)
        if not followed or [sum(found["correct"])] != again[name]["correct"]:
            problems.append(f"the choice by {name} rows does not follow from its curve")
    return [f"{path}: {problem}" for problem in problems]

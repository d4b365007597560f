# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A table of the board: what ``fedblend auto`` finds on it, without its kept runs."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedblend.config.build import build
from fedblend.data.dataset import Task
from fedblend.runs.auto import candidates
from fedblend.runs.auto.comparison import AutoComparison, Screen
from fedblend.runs.auto.tuning import Split
from fedblend.trees import precision
from fedblend_reproductions.board.cells import source
from fedblend_reproductions.claims import plain
from fedblend_reproductions.silos.tables import Silos


def compare(
    known: Silos, table: Path, minutes: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """The entry of a table, as plain values.

    Args:
        known: what is asked of it.
        table: its CSV file.
        minutes: time budget, in the sense of ``fedblend auto``.
        say: takes lines of progress.
    """
    begun = time.perf_counter()
    request = candidates.Request(
        table, known.client, known.target, None, (), tuple(known.drop), "linear"
    )
    with TemporaryDirectory() as folder, precision("float32"):
        contest = AutoComparison(request, Path(folder) / "auto", minutes, Screen(say))
        seeds, state = contest.judge(), contest.state
        first = candidates.BY_NAME["fedavg"].first
        built = build(candidates.configuration(request, "fedavg", first, seeds=seeds))
    splits = [Split.read(one, "test", built.task) for one in built.federations]
    origin = source()
    origin["versions"] |= {one: version(one) for one in ("numpy", "scikit-learn")}
    told = ("criterion", "methods", "deploy", "verdict", "findings", "left_out")
    found = {
        "clients": state["seen"]["clients"],
        "rows": state["seen"]["rows"],
        "constants": score_constants(built.task, splits),
        **{key: state[key] for key in told},
        **origin,
        "dirty": "+changes" in (origin["commit"] or ""),
        "date": datetime.now(UTC).date().isoformat(),
        "seeds": seeds,
        "minutes": minutes,
        "seconds": time.perf_counter() - begun,
    }
    return plain(found)


def score_constants(task: Task, splits: list[Split]) -> dict[str, float]:
    """The test score of constants from training rows, mean of clients and splits.

    One is the mean over the rows of all clients, the other that of each client's own.
    Of two classes each counts once more than it occurs, so that none is impossible.
    """
    overall, own = [], []
    for train, held in splits:
        for at, place in zip(train.clients, held.clients, strict=True):
            targets = held.targets[place]
            if len(targets):
                overall.append(constant_loss(task, train.targets, targets))
                own.append(constant_loss(task, train.targets[at], targets))
    return {"constant": float(np.mean(overall)), "own_constant": float(np.mean(own))}


def constant_loss(task: Task, known: np.ndarray, targets: np.ndarray) -> float:
    """The score on some targets of the constant that others have as their mean."""
    if task.kind == "regression":
        return float(task.scale**2 * np.mean((targets - known.mean()) ** 2))
    often = (1 + known.sum()) / (2 + len(known))
    return float(-np.mean(np.log(np.where(targets > 0, often, 1 - often))))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Learning curves from the rows of a run, and which splits and metrics to show.

A row is ``Record.row()``: plain values, as in a line of ``metrics.jsonl``. Rows of
several seeds carry ``seed``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.simulation.result import Results

MODELS = ("shared", "local", "personal")
"""The models of a client, in the order of tables and legends."""
MAIN = ("accuracy", "mse", "recall", "auc")
"""The metric of a task to show first, besides its loss."""
HELD_OUT = ("test", "validation")
"""The splits worth a figure; training rows only where nothing was held out."""

Row = dict[str, Any]


class Curve(NamedTuple):
    """The mean over clients of one model by round; low and high are over seeds."""

    rounds: np.ndarray
    bits: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def rows_of(run: Results, seeds: Sequence[int] | None = None) -> list[Row]:
    """The records of a run as rows, with how long the clients trained alone.

    Args:
        run: a run of one replica or of several.
        seeds: the seed of each replica; 0, 1, ... if None.
    """
    alone = {} if run.alone is None else {"alone": run.alone}
    rows = []
    for record in run.records:
        replicas = [record] if run.replicas is None else record
        for seed, one in zip(seeds or range(len(replicas)), replicas, strict=True):
            rows.append({"seed": seed, **one.row(), **alone})
    return rows


def shown_splits(rows: Sequence[Row]) -> list[str]:
    """The held-out splits that were measured, or else all that were."""
    measured = rows[-1]["measures"] if rows else {}
    return [name for name in HELD_OUT if name in measured] or list(measured)


def shown_metrics(rows: Sequence[Row], split: str) -> list[str]:
    """The main metric of a split, then the loss."""
    return in_order(next(iter(rows[-1]["measures"][split].values()), {}))


def in_order(metrics: Iterable[str]) -> list[str]:
    """The main one of these metrics, then the loss.

    >>> in_order(["loss", "auc", "recall@5"])
    ['recall@5', 'loss']
    """
    found = list(metrics)
    others = [name for name in found if name != "loss"]
    kinds = {name: name.partition("@")[0] for name in others}
    order = [*MAIN, *kinds.values()]
    others.sort(key=lambda name: order.index(kinds[name]))
    return others[:1] + (["loss"] if "loss" in found else [])


def curves(rows: Sequence[Row], split: str, metric: str) -> dict[str, Curve]:
    """The curve of each model that was measured, over the rounds all seeds have."""
    seeds: dict[Any, dict[int, Row]] = {}
    for row in rows:
        seeds.setdefault(row.get("seed"), {})[row["round"]] = row
    rounds = sorted(set.intersection(*(set(known) for known in seeds.values())))
    table = [[known[number] for known in seeds.values()] for number in rounds]
    bits = [np.mean([row["bits_up"] + row["bits_down"] for row in at]) for at in table]
    found = {}
    for model in MODELS:
        if model not in rows[-1]["measures"].get(split, {}):
            continue
        path = ("measures", split, model, metric, "mean")
        values = np.array([[value_at(row, *path) for row in at] for at in table])
        found[model] = Curve(
            np.array(rounds),
            np.array(bits),
            values.mean(axis=1),
            values.min(axis=1),
            values.max(axis=1),
        )
    return found


def value_at(row: Mapping[str, Any], *path: str) -> float:
    """A number deep inside a row or a summary; NaN where it is missing or null."""
    value: Any = row
    for name in path:
        value = value.get(name, {})
    return float("nan") if value in ({}, None) else float(value)


def rounds_alone(alone: Mapping[str, Any] | None) -> str:
    """How long the clients trained alone, for a legend.

    >>> rounds_alone({"rounds": 290}), rounds_alone({"rounds": None})
    ('290 rounds', 'own best round')
    """
    if alone is None:
        return ""
    rounds = alone["rounds"]
    if rounds is None:
        return "own best round"
    return f"{rounds} round{'' if rounds == 1 else 's'}"


def training_alone(alone: Mapping[str, Any]) -> str:
    """How long the clients trained alone, and how that number was chosen.

    >>> training_alone({"rounds": 290, "chosen_on": "validation rows",
    ...                 "metric": "accuracy", "tried": 600})
    '290 rounds, the best of 600 tried for accuracy on validation rows'
    """
    rows = alone.get("chosen_on")
    if rows is None:
        return f"{rounds_alone(alone)}, as asked"
    if alone["rounds"] is None:
        return f"every client's own best round for {alone['metric']} on {rows}"
    best = f"the best of {alone['tried']} tried"
    return f"{rounds_alone(alone)}, {best} for {alone['metric']} on {rows}"

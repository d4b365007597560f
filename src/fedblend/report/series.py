# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Curves and per-client gains out of a run's rows, for figures and the terminal.

A row is ``Record.row()``, plain values as they stand in a file of metrics; rows of
several seeds carry ``seed``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.gains import Evidence, Gain

MODELS = ("shared", "local", "personal")
"""The models of a client, in the order of tables and legends."""
MAIN = ("accuracy", "mse", "recall", "auc")
"""What to show first of a task, besides its loss."""
HELD_OUT = ("test", "validation")
"""The splits worth a figure; training rows only where nothing was held out."""

Row = dict[str, Any]


class Curve(NamedTuple):
    """One model's mean over clients, at some rounds; low and high are over seeds."""

    rounds: np.ndarray
    bits: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Gains(NamedTuple):
    """What each client gains by its personal model over another; mean over seeds."""

    gain: Gain
    metric: str
    split: str
    reference: str
    seeds: int = 1


def shown_splits(rows: Sequence[Row]) -> list[str]:
    """The held-out splits that were measured, or those there are."""
    measured = rows[-1]["measures"] if rows else {}
    return [name for name in HELD_OUT if name in measured] or list(measured)


def shown_metrics(rows: Sequence[Row], split: str) -> list[str]:
    """The main metric of a split, and the loss after it."""
    return in_order(next(iter(rows[-1]["measures"][split].values()), {}))


def in_order(metrics: Iterable[str]) -> list[str]:
    """The main one of some metrics, and the loss after it."""
    found = list(metrics)
    others = [name for name in found if name != "loss"]
    kinds = [*MAIN, *map(_kind, others)]
    others.sort(key=lambda name: kinds.index(_kind(name)))
    return others[:1] + (["loss"] if "loss" in found else [])


def _kind(metric: str) -> str:
    """The metric without its number: "recall@5" is a kind of recall."""
    return metric.partition("@")[0]


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
        values = np.array([[_mean(row, split, model, metric) for row in at]
                           for at in table])  # fmt: skip
        found[model] = Curve(
            np.array(rounds),
            np.array(bits),
            values.mean(axis=1),
            values.min(axis=1),
            values.max(axis=1),
        )
    return found


def _mean(row: Row, split: str, model: str, metric: str) -> float:
    spread = row["measures"].get(split, {}).get(model, {}).get(metric, {})
    value = spread.get("mean")
    return float("nan") if value is None else float(value)


def all_gains(evidence: Evidence, split: str, metric: str) -> list[Gains]:
    """Each client's gain over training alone and over the shared model.

    A gain is an improvement, whichever direction is better; several seeds are
    averaged. Empty where there is no other model to compare with.
    """
    seeds = len(evidence.measured)
    return [
        Gains(evidence.gain(split, metric, other), metric, split, other, seeds)
        for other in evidence.others(split)
    ]


def rows_of(records: Sequence[Any]) -> list[Row]:
    """The rows of a run's records; the replicas of a run become its seeds."""
    rows = []
    for record in records:
        if isinstance(record, list):
            rows += [
                {**one.row(), "seed": replica} for replica, one in enumerate(record)
            ]
        else:
            rows.append(record.row())
    return rows

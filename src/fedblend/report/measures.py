# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The measures of a run: as rows, and which clients are harmed.

A row is ``Record.row()``: plain values, as in a line of ``metrics.jsonl``. Rows of
several seeds carry ``seed``.

A client is harmed if its personal model is worse for it than another model that it
could have had: the shared one, or one that it trains alone. A client counts as harmed
only where the 95 % interval of its gain lies below zero; see ``gains``. With several
seeds values are means over them, and intervals are those of the means.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.errors import InputError
from fedblend.metrics import main_first
from fedblend.simulation.result import Results
from fedblend.stats.gains import Evidence, Gain

MODELS = ("shared", "local", "personal")
"""The models of a client, in the order of tables and legends."""
HELD_OUT = ("test", "validation")
"""The splits worth a table; training rows only where nothing was held out."""
OTHERS = {"local": "training alone", "shared": "the shared model"}

Row = dict[str, Any]


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


def main_splits(rows: Sequence[Row]) -> list[str]:
    """The held-out splits that were measured, or else all that were."""
    measured = rows[-1]["measures"] if rows else {}
    return [name for name in HELD_OUT if name in measured] or list(measured)


def list_metrics(rows: Sequence[Row], split: str) -> list[str]:
    """The metrics of a split: the main one first, the loss last."""
    return main_first(next(iter(rows[-1]["measures"][split].values()), {}))


def align_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of all seeds for each round that all seeds have reached."""
    seeds: dict[Any, dict[int, Row]] = {}
    for row in rows:
        seeds.setdefault(row.get("seed"), {})[row["round"]] = row
    common = set.intersection(*map(set, seeds.values())) if seeds else ()
    return [[known[number] for known in seeds.values()] for number in sorted(common)]


def seeds_range(
    table: Sequence[Sequence[Row]], *path: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A number of each round: its mean over seeds, the lowest and the highest."""
    values = np.array([[value_at(row, *path) for row in at] for at in table])
    return values.mean(axis=1), values.min(axis=1), values.max(axis=1)


def value_at(row: Mapping[str, Any], *path: str) -> float:
    """A number deep inside a row or a summary; NaN where it is missing or null."""
    value: Any = row
    for name in path:
        value = value.get(name, {})
    return float("nan") if value in ({}, None) else float(value)


def mean_over_seeds(runs: Sequence[Mapping[str, Any]], *path: str) -> float:
    """The mean of a number of every seed; NaN where a seed has none."""
    return float(np.mean([value_at(run, *path) for run in runs]))


def rounds_alone(alone: Mapping[str, Any] | None) -> str:
    """How long the clients trained alone.

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
    rows, rate = alone.get("chosen_on"), alone.get("rate", 1.0)
    at = "" if rate == 1 else f" at {rate:.3g} times the rate"
    if rows is None:
        return f"{rounds_alone(alone)}{at}, as asked"
    if alone["rounds"] is None:
        return f"every client's own best round for {alone['metric']} on {rows}"
    best = f"the best of {alone['tried']} tried"
    return f"{rounds_alone(alone)}{at}, {best} for {alone['metric']} on {rows}"


class ModelScores(NamedTuple):
    """One metric of all models of the measured clients; means over seeds."""

    split: str
    metric: str
    values: dict[str, np.ndarray]
    """The metric of each model, over clients."""
    gains: dict[str, Gain]
    """What the personal model improves on each other model; never empty."""
    seeds: int = 1

    @property
    def reference(self) -> str:
        """The first of the other models: training alone where it was measured."""
        return next(iter(self.gains))

    @property
    def gain(self) -> Gain:
        """The gain over the first of the other models."""
        return self.gains[self.reference]


class Clients(NamedTuple):
    """What is known of the measured clients; arrays over them."""

    ids: np.ndarray
    names: list[str]
    train: np.ndarray
    test: np.ndarray
    alpha: np.ndarray | None = None
    """The weight of the shared model, where there is one."""


def compare_models(evidence: Evidence, split: str, metric: str) -> ModelScores | None:
    """The comparison, or None where there is no other model to compare with."""
    gains = {
        other: evidence.gain(split, metric, other) for other in evidence.others(split)
    }
    if not gains:
        return None
    values = {
        model: np.mean([of[split][model][metric] for of in evidence.measured], axis=0)
        for model in evidence.measured[0][split]
    }
    return ModelScores(split, metric, values, gains, len(evidence.measured))


def compare_run(
    run: Results, rows: list[Row], alpha: np.ndarray | None = None
) -> tuple[ModelScores, Clients] | None:
    """The models of a completed run by the main metric of its first shown split.

    Args:
        run: a completed run.
        rows: its rows, see ``rows_of``.
        alpha: the mixing weight of each measured client, by seed where there are
            several.
    """
    splits = main_splits(rows)
    if not splits:
        return None
    found = compare_models(run.evidence, splits[0], list_metrics(rows, splits[0])[0])
    if found is None:
        return None
    ids, data = run.measured_ids, run.federated_data
    if alpha is not None:
        alpha = np.asarray(alpha, np.float64).reshape(len(ids), -1).mean(axis=1)
    names = [data.name(int(client)) for client in ids]
    test = data.splits[found.split].counts[ids]
    return found, Clients(ids, names, data.train.counts[ids], test, alpha)


def harm_rows(found: ModelScores, clients: Clients) -> list[dict[str, Any]]:
    """The rows of ``harm.csv``: one for each client, the most harmed first.

    ``harm`` is the largest loss to another model by the measured values alone, 0 where
    there is none; ``gain_low``, ``gain_high`` and ``harmed`` compare with the first of
    the other models. A client without rows in the split has empty cells.
    """
    harm = np.maximum(-np.stack([of.value for of in found.gains.values()]).min(0), 0)
    rows = []
    for place in np.argsort(-harm, kind="stable"):
        row: dict[str, Any] = {
            "id": int(clients.ids[place]),
            "name": clients.names[place],
            "train": int(clients.train[place]),
            "test": int(clients.test[place]),
        }
        if clients.alpha is not None:
            row["alpha"] = float(clients.alpha[place])
        for model in MODELS:
            if model in found.values:
                row[f"{model}_{found.metric}"] = _cell(found.values[model][place])
        for other, gain in found.gains.items():
            row[f"gain_over_{other}"] = _cell(gain.value[place])
        row["harm"] = _cell(harm[place])
        for other, gain in found.gains.items():
            first = other == found.reference
            start = "gain" if first else f"gain_over_{other}"
            row[f"{start}_low"] = _cell(gain.low[place])
            row[f"{start}_high"] = _cell(gain.high[place])
            row["harmed" if first else f"harmed_by_{other}"] = _verdict(gain, place)
        rows.append(row)
    return rows


def _verdict(gain: Gain, place: int) -> str:
    if gain.not_finite[place]:
        return "not finite"
    if np.isnan(gain.value[place]):
        return ""
    return "yes" if gain.harmed[place] else "no"


def _cell(value: Any) -> float | str:
    return float(value) if np.isfinite(value) else ""


FIRST = ("seed", "round", "rounds", "seconds", "received", "dropped", "rejected")
"""The columns that all lines of a record share, besides the bits."""


def tidy(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each row, split, model and metric; all numbers of the row in each.

    A row without measures is one line.

    Args:
        rows: as of ``measures.rows_of``.
    """
    lines = []
    for row in rows:
        start = {name: row[name] for name in (*FIRST, "bits_up", "bits_down")}
        measured = [
            {"split": split, "model": model, "metric": metric, **spread}
            for split, models in row["measures"].items()
            for model, metrics in models.items()
            for metric, spread in metrics.items()
        ]
        lines += [start | one for one in measured or [{}]]
    return lines


def frame(rows: Sequence[Row]) -> Any:
    """The lines of ``tidy`` as a pandas frame."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise InputError("frame: needs pandas: pip install pandas") from None
    return pandas.DataFrame(tidy(rows))

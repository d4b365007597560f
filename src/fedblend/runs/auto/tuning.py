# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of each method, chosen on validation rows, and the scores it then has.

A setting is moved by factors of ten, then of three, while the mean over clients and
splits on validation rows falls: one setting after the other, for every method alike.
The models that are tested have these settings and
are trained on all rows but the test rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from fedblend.config.build import Built
from fedblend.data.dataset import NUMBERS, Task
from fedblend.data.federated import FederatedData
from fedblend.runs.auto import linear
from fedblend.runs.auto.candidates import ALONE, Candidate, Request
from fedblend.runs.auto.linear import PooledRows
from fedblend.selection.one_letter import (
    Letters,
    held_out_errors,
    solve_flix,
    solve_models,
)
from fedblend.stats.constant_baseline import constant_losses
from fedblend.stats.survival import concordance

FACTORS = (10.0, 3.0)
LEAST, MOST = 1e-6, 1e6
"""Of a setting."""
MOST_LEVEL = 3.29
"""The largest variance of an intercept of classes, that of the logistic distribution: a
probability is uniform then. More would make it certain where a client's training rows
have one class, and validation rows, which have that class too, would agree."""
ALPHAS = (0.02, 0.98)
"""The smallest and the largest alpha."""
LITTLE = 1e-4
"""A smaller part of the score is no reason to move."""
TURNS = 2
"""How often every setting is moved."""
TUNING_SPLITS, TUNING_INPUTS = 5, 400_000
"""Splits whose validation rows choose settings: so many, and more of a smaller table,
as long as all inputs of their rows are not more."""


class Table(NamedTuple):
    """A table as every method takes it."""

    request: Request
    task: Task
    chosen: Built
    """Its splits with validation rows, which choose settings."""
    tested: Built
    """The same splits; what is tested is trained on all rows but the test rows."""
    to_choose: Sequence["AnySplit"]
    """The rows of ``chosen``: to train on, and of validation."""
    to_test: Sequence["AnySplit"]
    """The rows of ``tested``: to train on, and of test."""
    settings: Mapping[str, Mapping[str, Any]]
    """Those of the methods that are tuned."""
    to_tune: Sequence["AnySplit"] = ()
    """What chooses settings of linear methods, where that is not ``to_choose``."""
    begin: Mapping[str, Mapping[str, Any]] = {}
    """Settings with which the search for those of a method begins."""
    slow: bool = False
    """Whether so few splits take so long that settings are chosen on few."""
    wrote: Sequence[PooledRows] = ()
    """Rows whose letters are counted, besides those of the folds."""


class Predictions(NamedTuple):
    """What a method predicts, for the splits it had time for: the first ones."""

    setting: Mapping[str, Any]
    complete: bool
    """Whether there was time to choose the setting."""
    validation: Sequence[np.ndarray]
    """Scores of the validation rows of each split, in the order of ``Table``'s rows:
    [rows, outputs], before softmax; numbers are centered and scaled by the task."""
    test: Sequence[np.ndarray]
    """Scores of the test rows, alike."""


class Split(NamedTuple):
    """The rows of a split, or letters of them: to train on, and held out."""

    train: Any
    held: Any

    @classmethod
    def read(cls, data: FederatedData, name: str, task: Task) -> "Split":
        """The split of federated data, with the held-out rows of this name."""
        return cls(scale_rows(task, data.train), scale_rows(task, data.splits[name]))


class LateSplit(NamedTuple):
    """A split of a large table, whose rows are read whenever they are used."""

    data: FederatedData
    name: str
    task: Task

    @property
    def train(self) -> PooledRows:
        """The rows to train on."""
        return scale_rows(self.task, self.data.train)

    @property
    def held(self) -> PooledRows:
        """The rows that are held out."""
        return scale_rows(self.task, self.data.splits[self.name])


AnySplit = Split | LateSplit


def scale_rows(task: Task, *splits: Any) -> PooledRows:
    """Rows of these splits, with targets in the unit that models are trained in."""
    rows = PooledRows.read(*splits, ranks=task.ranks)
    if task.kind in NUMBERS:
        rows.targets = task.change_unit(rows.targets.astype(np.float64))
    return rows


def models(
    task: Task, name: str, rows: PooledRows | Letters, setting: Mapping[str, float]
) -> np.ndarray:
    """Every client's model by a method, [clients, entries]."""
    share = name != ALONE
    if isinstance(rows, Letters):
        if name == "flix":
            return solve_flix(rows, **setting)
        return solve_models(rows, **setting, share=share, outputs=task.outputs)[1]
    if name == "flix":
        return linear.flix_models(task.kind, rows, task.outputs, **setting)
    return linear.hierarchical_models(
        task.kind, rows, task.outputs, **setting, share=share
    )


def client_means(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The mean of a client's rows, NaN without any.

    >>> client_means(np.array([1.0, 3.0, 5.0]), np.array([2, 0, 1]))
    array([ 2., nan,  5.])
    """
    owner = linear.repeat_clients(counts)
    total = np.bincount(owner, values, minlength=len(counts))
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)


def predict(
    task: Task,
    name: str,
    splits: Sequence[AnySplit],
    setting: Mapping[str, float],
) -> list[np.ndarray]:
    """The scores of the held-out rows of each split, [rows, outputs].

    Letters are scored by the models themselves.
    """
    found = []
    for split in splits:
        made, held = models(task, name, split.train, setting), split.held
        found.append(made if isinstance(held, Letters) else held.scores(made))
    return found


def measure(
    task: Task, splits: Sequence[AnySplit], scores: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Metrics of every client, [splits, clients], of the first splits if few scores.

    The criterion is the first; NaN where a client has no rows, or too few classes.

    Args:
        task: what is predicted.
        splits: with the rows that were held out.
        scores: of these rows in each split, [rows, outputs].
    """
    found: dict[str, list[np.ndarray]] = {}
    for split, of in zip(splits, scores, strict=False):
        for key, each in _metrics(task, of, split.held).items():
            found.setdefault(key, []).append(each)
    return {key: np.stack(each) for key, each in found.items()}


def mean_loss(
    task: Task, splits: Sequence[AnySplit], scores: Sequence[np.ndarray]
) -> float:
    """The criterion, mean over splits and clients; infinite where it is not finite."""
    loss, *_ = measure(task, splits, scores).values()
    mean = float(np.nanmean(loss))
    return mean if np.isfinite(mean) else np.inf


def measure_constants(built: Built, split: str) -> np.ndarray:
    """The losses of both constant predictions, [2, splits, clients]."""
    task = built.task
    each = [
        constant_losses(data, task.kind, task.outputs, split)
        for data in built.federations
    ]
    return np.stack(each, axis=1)


def _metrics(
    task: Task, scores: np.ndarray, held: PooledRows | Letters
) -> dict[str, np.ndarray]:
    if isinstance(held, Letters):
        error = held_out_errors(held, scores) / held.counts[:, 0]
        if task.kind == "regression":
            error = task.scale**2 * error
            return {"mse": error, "rmse": np.sqrt(error)}
        return {"log_loss": error / 2}

    def mean(values: np.ndarray) -> np.ndarray:
        return client_means(values, held.counts)

    if task.kind == "survival":
        ranks = [concordance(scores[at, 0], held.targets[at]) for at in held.clients]
        loss = linear.cox_losses(held, scores) / np.where(
            held.counts > 0, held.counts, np.nan
        )
        return {"cox_loss": loss, "c_index": np.array(ranks)}
    loss = mean(linear.losses(task.kind, scores, held.targets))
    if task.kind in NUMBERS:
        found, unit, name = scores[:, 0], task.scale, "mse"
        if task.kind == "counts":
            with np.errstate(over="ignore"):
                found, unit, name = np.exp(found), task.loss_unit, "deviance"
        gap = np.abs(found - held.targets.reshape(len(scores)))
        return {name: task.loss_unit * loss, "mae": unit * mean(gap)}
    if scores.shape[1] > 1:
        right = scores.argmax(axis=1) == held.targets
        return {"log_loss": loss, "accuracy": mean(right)}
    right = (scores[:, 0] > 0) == (held.targets > 0)
    areas = _areas(scores[:, 0], held.targets > 0, held.counts)
    return {"log_loss": loss, "accuracy": mean(right), "auc": areas}


def _areas(scores: np.ndarray, hits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Every client's area under the ROC curve: how often a hit is above another row."""
    clients, owner = len(counts), linear.repeat_clients(counts)
    # Sorted by client first: a rank less the rows of clients before is a client's own.
    whole = rankdata(owner * (len(scores) + 1) + rankdata(scores, "dense"))
    ranks = whole - np.repeat(np.cumsum(counts) - counts, counts)
    positive = np.bincount(owner, hits, minlength=clients)
    above = np.bincount(owner, ranks * hits, minlength=clients)
    pairs = positive * (counts - positive)
    areas = (above - positive * (positive + 1) / 2) / np.maximum(pairs, 1)
    return np.where(pairs > 0, areas, np.nan)


def evaluate_linear(
    table: Table, candidate: Candidate, left: Callable[[], float]
) -> Predictions:
    """Tune a linear method, and predict with it.

    Args:
        table: what is predicted; a setting that is known stays.
        candidate: the method.
        left: the seconds that are left for it; raises if the user asked to stop.
    """
    task, name, complete = table.task, candidate.name, True
    setting = table.settings.get(name)
    if setting is None:
        splits = table.to_tune or table.to_choose
        inputs = int(splits[0].train.counts.sum() * np.prod(task.shape))
        most = 0 if table.slow else TUNING_INPUTS // inputs
        splits, begin = splits[: max(TUNING_SPLITS, most)], table.begin.get(name, {})
        setting, complete = tune(
            task, candidate, splits, table.settings, lambda: left() > 0, begin
        )
    validation = predict(task, name, table.to_choose, setting)
    test = predict(task, name, table.to_test, setting)
    return Predictions(setting, complete, validation, test)


def tune(
    task: Task,
    candidate: Candidate,
    splits: Sequence[AnySplit],
    chosen: Mapping[str, Mapping[str, float]],
    going: Callable[[], bool],
    begin: Mapping[str, float],
) -> tuple[dict[str, float], bool]:
    """The settings of a method, and whether there was time to choose them.

    Args:
        task: what is predicted.
        candidate: the method.
        splits: with validation rows.
        chosen: the settings of methods that were tuned before.
        going: False when no more settings may be tried.
        begin: settings with which to begin, of those that are known.
    """
    taken = {
        own: chosen[name][key]
        for own, (name, key) in candidate.takes.items()
        if name in chosen
    }
    seen: dict[tuple[float, ...], float] = {}

    def score(setting: Mapping[str, float]) -> float:
        place = tuple(setting.values())
        if place not in seen:
            scores = predict(task, candidate.name, splits, setting)
            seen[place] = mean_loss(task, splits, scores)
        return seen[place]

    fixed = candidate.fixed.get(task.kind, {})
    moving = [key for key in candidate.first if key not in fixed]
    first = {**candidate.first, **taken, **begin, **fixed}
    most = {"level": MOST_LEVEL} if task.kind in ("binary", "classes") else {}
    starts = [first, *([{**first, **candidate.again}] if candidate.again else [])]
    ends = [_descend(score, one, moving, most, going) for one in starts]
    return min((here for here, _ in ends), key=score), all(done for _, done in ends)


def _descend(
    score: Callable[[Mapping[str, float]], float],
    here: dict[str, float],
    moving: Sequence[str],
    most: Mapping[str, float],
    going: Callable[[], bool],
) -> tuple[dict[str, float], bool]:
    """Move one setting after the other while the score falls; whether it is done."""
    best = score(here)
    for factor in FACTORS:
        for key in [*moving] * TURNS:
            for change in (factor, 1 / factor):
                while True:
                    value = _move(key, here[key], change, most.get(key, MOST))
                    there = {**here, key: value}
                    if there == here:
                        break
                    if not going():
                        return here, False
                    if score(there) >= best - LITTLE * abs(best):
                        break
                    here, best = there, score(there)
    return here, True


def _move(key: str, value: float, factor: float, most: float = MOST) -> float:
    """A setting times a factor; of alpha, the odds move by its root.

    >>> _move("ridge", 0.01, 10.0), _move("alpha", 0.5, 9.0)
    (0.1, 0.75)
    """
    if key == "alpha":
        odds = value / (1 - value) * np.sqrt(factor)
        return float(f"{np.clip(odds / (1 + odds), *ALPHAS):.3g}")
    return float(f"{np.clip(value * factor, LEAST, most):.3g}")

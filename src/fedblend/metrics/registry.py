# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The metrics by name: what a configuration, a node's policy and reports know of them.

Names stand here once. The pattern of ``measure.metrics``, its error line, what a node
may send and which targets a metric is for are read from this table.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from fedblend.checks import words
from fedblend.core import Loss
from fedblend.errors import UserError
from fedblend.metrics import rows
from fedblend.metrics.metric import Measure, Metric
from fedblend.mixing import Apply


class MetricEntry(NamedTuple):
    """A metric by name: how it is built, and which kinds of targets it is for."""

    build: Callable[[Callable], Metric]
    """From the model's function; "loss" from the loss, "recall" for one place."""
    kinds: tuple[str, ...]

    @property
    def facts(self) -> Metric:
        """A metric with the same properties, to read them; not to be called."""
        return self.build(lambda params, rows: rows)


_LABELS = ("classes", "binary")
METRICS: Mapping[str, MetricEntry] = MappingProxyType(
    {
        "loss": MetricEntry(
            rows.mean_loss,
            ("classes", "binary", "regression", "counts", "sequence", "tags"),
        ),
        "accuracy": MetricEntry(rows.accuracy, (*_LABELS, "sequence")),
        "balanced_accuracy": MetricEntry(rows.balanced_accuracy, _LABELS),
        "auc": MetricEntry(rows.auc, _LABELS),
        "average_precision": MetricEntry(rows.average_precision, _LABELS),
        "log_loss": MetricEntry(rows.log_loss, _LABELS),
        "brier": MetricEntry(rows.brier_score, _LABELS),
        "calibration_error": MetricEntry(rows.calibration_error, _LABELS),
        "calibration_gap": MetricEntry(rows.calibration_gap, _LABELS),
        "mse": MetricEntry(rows.mean_squared_error, ("regression",)),
        "rmse": MetricEntry(rows.root_mean_squared_error, ("regression",)),
        "mae": MetricEntry(rows.mean_absolute_error, ("regression",)),
        "r2": MetricEntry(rows.r2_score, ("regression",)),
        "deviance": MetricEntry(rows.poisson_deviance, ("counts",)),
        "recall": MetricEntry(partial(rows.recall_at, k=1), ("classes", "tags")),
    }
)
"""All metrics by name; "recall" is written with a number, as in recall@5."""
STANDARD: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "classes": ("loss", "accuracy"),
        "binary": ("loss", "accuracy", "auc", "brier"),
        "regression": ("loss", "mse", "mae", "r2"),
        "counts": ("loss", "deviance"),
        "sequence": ("loss", "accuracy"),
        "tags": ("loss", "recall@5"),
    }
)
"""What is measured where nothing is asked for, by the kind of the targets."""
NUMBERED = ("recall",)
"""Metrics that are written with a number behind an "@"."""


def pattern(names: Iterable[str] = METRICS) -> str:
    """The regular expression of the metrics' names, as a configuration has them."""
    one = [f"{name}@[1-9][0-9]{{0,5}}" if name in NUMBERED else name for name in names]
    return f"^({'|'.join(one)})$"


def list_names(names: Iterable[str] = METRICS) -> str:
    """The names for an error line.

    >>> list_names(("loss", "auc", "recall"))
    'loss, auc or recall@K'
    """
    shown = [f"{name}@K" if name in NUMBERED else name for name in names]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def entry(name: str) -> MetricEntry | None:
    """The entry of a name such as "auc" or "recall@5"; None where there is none."""
    return METRICS.get(name.partition("@")[0])


def build(name: str, kind: str, loss: Loss, apply: Apply) -> Metric:
    """The metric of a name, for targets of a kind.

    >>> loss = apply = lambda params, rows: rows
    >>> build("recall@5", "tags", loss, apply).bounded
    True
    """
    found, number = entry(name), name.partition("@")[2]
    if found is None or not re.match(pattern(), name):
        raise UserError("metrics: name", name, f"one of {list_names()}")
    if number:
        return rows.recall_at(apply, int(number))
    if name == "accuracy" and kind == "sequence":
        return rows.next_token_accuracy(apply)
    return found.build(loss if name == "loss" else apply)


def standard(kind: str, loss: Loss, apply: Apply) -> dict[str, Metric]:
    """The usual metrics of a task, by the kind of its targets."""
    words(*STANDARD)("metrics: kind", kind)
    return {name: build(name, kind, loss, apply) for name in STANDARD[kind]}


def make_metrics(measure: Mapping[str, Metric | Measure] | None) -> dict[str, Metric]:
    """Metrics by name, as the argument ``measure`` of ``simulate`` has them.

    A plain function becomes a ``Metric`` where its name says which direction is better:
    one of ``METRICS`` such as "loss" or "auc", with anything behind an "@".
    """
    if not isinstance(measure or {}, Mapping):
        raise UserError("measure", measure, "a mapping from names to metrics")
    return {name: _make_metric(name, one) for name, one in (measure or {}).items()}


def _make_metric(name: str, measure: Metric | Measure) -> Metric:
    if isinstance(measure, Metric):
        return measure
    found = entry(name)
    if found is None or not callable(measure):
        known = ", ".join(METRICS)
        allowed = f"a Metric(fn, higher_is_better), or a function called one of {known}"
        raise UserError(f"measure: {name}", measure, allowed)
    return dataclasses.replace(found.facts, fn=measure, with_rows=None)

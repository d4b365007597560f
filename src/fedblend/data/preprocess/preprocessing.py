# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A fitted preprocessing: from the columns of a raw table to the inputs of a model.

- A number is standardized by the mean and deviation of the training rows that have it,
  and clipped; where it is missing, it is the mean. A number that is the same in all
  training rows is 0. A date is the same in days, with sine and cosine of its place in
  the year, week and day.
- A truth value is 0 or 1; where it is missing, what is more frequent.
- A category has an input that is 1. One that no training row has is unknown: it shares
  the input of the rare ones, or has 0 everywhere. Where it is missing, it is the most
  frequent one, unless an input says that it is missing.

The statistics of training rows are means, and only means. Every client computes means
over its own rows, and the statistics are means of these, weighted by rows. So clients
that never pool their rows, such as the nodes of a federation, find the same
preprocessing::

    preprocessing = fit(schema, [schema.encode(columns) for columns in clients])

For each column these are the fraction of rows with a value, and the mean of the value
with its variance, or the fraction of each category. A client's variance is around its
own mean, which is exact for values that are large compared to their deviation. Around
the mean of all clients m, a client with mean m_i and variance v_i has v_i + (m_i - m)^2
(Chan, Golub and LeVeque 1983).

A model may ask for ranks, too: ``Schema.ranks``. The rank of a number is its place
among the edges of ``BINS`` bins with about as many rows each, 3.5 in the middle of the
fourth one. Each client tells the quantiles of its training rows; the edges are the
quantiles of all of these, weighted by rows: those of the mean of the clients'
distributions.

A few values far out would ruin mean and variance of a column. So a client first moves
them to a bound around its own median, in median absolute deviations. Other values, and
so the statistics of columns without such values, are not changed.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fedblend.data.dataset import DataError
from fedblend.data.preprocess.columns import PERIODS, SCALED, Column
from fedblend.data.preprocess.schema import Columns, Schema
from fedblend.data.readers.checks import list_some

BINS = 16
"""Bins of a number between quantiles."""
LEVELS = np.linspace(0.01, 0.99, BINS + 1)
"""Of the quantiles that a client tells: the least and the largest value are not."""
FARTHEST = 10.0
"""Deviations from the mean; a value that is farther away is clipped."""
_IN_SHORT = {
    "standardize": "standardized",
    "as_is": "used as they are",
    "flag": "yes or no",
    "one_hot": "one-hot",
    "ordinal": "ordered",
    "date": "dates",
}
_FORMAT = "fedblend preprocessing 1"
_CONSTANT = 8 * float(np.finfo(np.float64).eps)
"""A deviation relative to the mean that is rounding, and no deviation."""
_NORMAL = 1.4826
"""The deviation of a normal distribution in median absolute deviations."""
_LEAST_VALUES, _FEW = 5, 20
"""Values that have a median absolute deviation; so few make the bound twice as far."""


class Fitted(NamedTuple):
    """The statistics of one column over training rows."""

    present: float
    """The fraction of rows that have a value."""
    mean: float = 0.0
    deviation: float = 0.0
    """The standard deviation; 0 of a column with one value."""
    shares: tuple[float, ...] = ()
    """The fraction of rows of each category, and of all others."""
    edges: tuple[float, ...] = ()
    """Of the bins of ranks, increasing; no ranks are inputs if there are none."""

    @property
    def scale(self) -> float:
        """The divisor of a standardized value; a column with one value is 0."""
        return self.deviation or np.inf


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """What training rows say about every column, and how a raw table is transformed."""

    schema: Schema
    fitted: tuple[Fitted, ...]
    """The statistics of the columns that are kept."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the raw columns."""
        return self.schema.names

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return self.schema.features

    def transform(self, columns: Columns) -> np.ndarray:
        """The inputs of the rows of a raw table: float32 [rows, features]."""
        return self.transform_encoded(self.schema.encode(columns))

    def transform_encoded(self, encoded: np.ndarray) -> np.ndarray:
        """The inputs of rows that the schema encoded: float32 [rows, features]."""
        columns = np.asarray(encoded).T
        made = np.empty((len(encoded), len(self.features)), np.float32)
        inputs = iter(made.T)
        for column, fitted, numbers in zip(
            self.schema.kept, self.fitted, columns, strict=True
        ):
            for one in _inputs(column, fitted, numbers):
                next(inputs)[:] = one
        for place in self.schema.ranked:
            next(inputs)[:] = _rank(self.fitted[place], columns[place])
        return made

    def count_clipped(self, inputs: np.ndarray) -> dict[str, int]:
        """The columns with clipped values among these inputs, and how many values."""
        first = np.cumsum([0, *(len(one.features) for one in self.schema.kept)])
        scaled = {
            one.name: int((np.abs(inputs[:, place]) >= FARTHEST).sum())
            for one, place in zip(self.schema.kept, first, strict=False)
            if one.encoding in SCALED
        }
        return {name: count for name, count in scaled.items() if count}

    def warnings(self, parts: Iterable[np.ndarray]) -> Iterator[str]:
        """A warning of columns with clipped values, from the inputs of all rows."""
        counts: Counter[str] = Counter()
        for inputs in parts:
            counts.update(self.count_clipped(inputs))
        if counts:
            shown = [f"{count} in {name!r}" for name, count in counts.most_common()]
            yield (
                f"preprocessing: values more than {FARTHEST:g} deviations from the "
                f"mean are clipped: {list_some(shown)}; check them, or leave the "
                "columns out with drop"
            )

    def describe(self) -> list[dict[str, Any]]:
        """What was seen in each column of the table, and what was done to it."""
        return describe(self.schema, self.fitted)

    def summarize(self) -> str:
        """What was done to all columns, on one line."""
        kept = [one.encoding for one in self.schema.kept]
        counts = [
            f"{kept.count(encoding)} {_IN_SHORT[encoding]}"
            for encoding in dict.fromkeys(kept)
        ]
        dropped = [
            f"{one.name!r} {one.why}"
            for one in self.schema.columns
            if one.encoding == "drop"
        ]
        said = (
            f"preprocessing: {len(kept)} columns make {len(self.features)} inputs "
            f"({', '.join(counts)})"
        )
        return f"{said}; dropped: {', '.join(dropped)}" if dropped else said

    def dump(self) -> str:
        """A text that ``parse`` reads, with the same numbers to the last bit."""
        kept = dict(zip(self.columns, self.fitted, strict=True))
        columns = []
        for one, record in zip(self.schema.columns, self.schema.records(), strict=True):
            own = kept.get(one.name)
            record["done"] = treatment(one, own)
            columns.append(
                record if own is None else record | {"fitted": own._asdict()}
            )
        ranks = {"ranks": True} if self.schema.ranks else {}
        return json.dumps({"format": _FORMAT, **ranks, "columns": columns}, indent=1)

    @classmethod
    def parse(cls, text: str) -> "Preprocessing":
        """Read a text of ``dump``.

        Raises:
            DataError: the text is something else.
        """
        try:
            stored = json.loads(text)
            if stored["format"] != _FORMAT:
                raise ValueError("format")
            schema = Schema.read_records(stored["columns"])
            schema = schema._replace(ranks=stored.get("ranks") is True)
            fitted = tuple(
                _read_fitted(one["fitted"], column)
                for one, column in zip(stored["columns"], schema.columns, strict=True)
                if column.encoding != "drop"
            )
            if not fitted or not all(fitted[place].edges for place in schema.ranked):
                raise ValueError("no columns, or no edges")
        except (LookupError, TypeError, ValueError, RecursionError):
            raise DataError("preprocessing: the text is damaged, or none") from None
        return cls(schema, fitted)


def describe(
    schema: Schema, fitted: Sequence[Fitted] | None = None
) -> list[dict[str, Any]]:
    """What was seen in each column, and what is done to it; see ``Preprocessing``."""
    kept = {} if fitted is None else dict(zip(schema.names, fitted, strict=True))
    return [
        {
            "column": one.name,
            "kind": one.kind,
            "seen": one.seen,
            "encoding": one.encoding,
            "done": treatment(one, kept.get(one.name)),
            "inputs": len(one.features),
        }
        for one in schema.columns
    ]


def _inputs(column: Column, fitted: Fitted, numbers: np.ndarray) -> list[np.ndarray]:
    """The inputs of one column: float64 [rows], one for each of its features."""
    absent = np.isnan(numbers)
    if column.encoding == "one_hot":
        parts = _one_hot(column, fitted, numbers, absent)
    else:
        parts = [_quantity(column, fitted, numbers, absent)]
        for part in column.parts:
            angle = 2 * np.pi * numbers / PERIODS[part]
            parts += [np.where(absent, 0.0, wave(angle)) for wave in (np.sin, np.cos)]
    return [*parts, absent.astype(np.float64)] if column.missing else parts


def _quantity(
    column: Column, fitted: Fitted, numbers: np.ndarray, absent: np.ndarray
) -> np.ndarray:
    if column.encoding == "flag":
        return np.where(absent, float(fitted.mean > 0.5), numbers)
    filled = np.where(absent, fitted.mean, numbers)
    if column.encoding == "as_is":
        return filled
    return np.clip((filled - fitted.mean) / fitted.scale, -FARTHEST, FARTHEST)


def _rank(fitted: Fitted, numbers: np.ndarray) -> np.ndarray:
    """The place of each number among the edges, in bins."""
    filled = np.where(np.isnan(numbers), fitted.mean, numbers)
    return np.interp(filled, fitted.edges, np.arange(len(fitted.edges)))


def _one_hot(
    column: Column, fitted: Fitted, numbers: np.ndarray, absent: np.ndarray
) -> list[np.ndarray]:
    unknown, shares = len(column.categories), np.array(fitted.shares)
    usual = -1 if column.missing else int(np.argmax(shares[:unknown]))
    codes = np.where(absent, usual, numbers).astype(np.int64)
    never = np.append(shares[:unknown] == 0, False)
    codes = np.where((codes >= 0) & never[codes], unknown, codes)
    return [
        (codes == place).astype(np.float64) for place in range(unknown + column.other)
    ]


def treatment(column: Column, fitted: Fitted | None) -> str:
    """What was done to a column, in words; without statistics, what will be."""
    said = {
        "drop": f"dropped: {column.why}",
        "standardize": "standardized",
        "as_is": "used as it is",
        "flag": "0 or 1",
        "one_hot": f"one-hot, {len(column.categories)} categories",
        "ordinal": "place in the order, standardized",
        "date": "days, standardized",
    }[column.encoding]
    if column.encoding == "drop":
        return said
    if fitted is not None and column.encoding in SCALED:
        said += f" (mean {fitted.mean:.4g}, deviation {fitted.deviation:.3g})"
    parts = [said, *(f"sine and cosine of the {part}" for part in column.parts)]
    parts += ["one input if it is missing"] if column.missing else []
    parts += [column.why] if column.why else []
    return "; ".join(parts)


def _read_fitted(stored: Mapping[str, Any], column: Column) -> Fitted:
    """The statistics of a column from JSON, checked."""
    present, mean, deviation = (
        float(stored[name]) for name in ("present", "mean", "deviation")
    )
    shares = tuple(float(share) for share in stored["shares"])
    if not np.isfinite([present, mean, deviation, *shares]).all():
        raise ValueError("finite")
    if len(shares) != (len(column.categories) + 1) * (column.encoding == "one_hot"):
        raise ValueError("shares")
    edges = tuple(float(edge) for edge in stored.get("edges", ()))
    if len(edges) > BINS + 1 or not all(np.isfinite(edges)) or any(np.diff(edges) <= 0):
        raise ValueError("edges")
    return Fitted(present, mean, deviation, shares, edges)


class Statistics(NamedTuple):
    """Means over the rows of one client, all float64."""

    rows: int
    """How many rows: the weight of the means."""
    present: np.ndarray
    """The fraction of rows with a value, of every kept column."""
    mean: np.ndarray
    """Over the rows that have it, of every quantity; 0 where no row does."""
    rest: np.ndarray
    """What rounding leaves out of that mean."""
    variance: np.ndarray
    """Around that mean, of every quantity."""
    shares: np.ndarray
    """The fractions of all columns of categories, one column after another."""
    quantiles: np.ndarray = np.empty(0)
    """At ``LEVELS``, of all columns with ranks, one column after another."""


def client_statistics(schema: Schema, encoded: np.ndarray) -> Statistics:
    """The statistics of one client's training rows, as the schema encodes them."""
    rows, known = max(len(encoded), 1), ~np.isnan(encoded)
    quantities, categories = _places(schema)
    counted = known[:, quantities]
    counts = np.maximum(counted.sum(axis=0), 1)
    values = _clip_outliers(np.asarray(encoded[:, quantities]), counts)
    mean = np.where(counted, values, 0.0).sum(axis=0) / counts
    away = np.where(counted, values - mean, 0.0)
    rest = away.sum(axis=0) / counts
    variance = np.maximum((away**2).sum(axis=0) / counts - rest**2, 0.0)
    shares = [
        np.bincount(encoded[known[:, place], place].astype(np.int64), minlength=size)
        for place, size in categories.items()
    ]
    return Statistics(
        len(encoded),
        known.sum(axis=0) / rows,
        mean,
        rest,
        variance,
        np.concatenate([*shares, np.empty(0)]) / rows,
        _quantiles(encoded[:, list(schema.ranked)]).ravel(),
    )


def _quantiles(values: np.ndarray) -> np.ndarray:
    """The lower quantiles of each column, [columns, levels]; 0 without values."""
    if not values.size:
        return np.zeros((values.shape[1], len(LEVELS)))
    last = np.maximum((~np.isnan(values)).sum(axis=0) - 1, 0)
    place = (LEVELS[:, None] * last).astype(int)
    return np.nan_to_num(np.take_along_axis(np.sort(values, axis=0), place, 0).T)


def _edges(quantiles: np.ndarray, weights: np.ndarray) -> tuple[float, ...]:
    """The edges of bins, from quantiles [clients, levels] and the clients' weights."""
    points, each = quantiles.ravel(), np.repeat(weights / len(LEVELS), len(LEVELS))
    order = np.argsort(points, kind="stable")
    below = np.cumsum(each[order])
    middle = (np.arange(len(LEVELS)) + 0.5) / len(LEVELS)
    at = np.searchsorted(below, middle * below[-1])
    return tuple(np.unique(points[order][at]).tolist())


def _clip_outliers(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Columns with values far out moved to a bound; ``counts`` of them are not NaN."""
    if not len(values):
        return values
    middle = _median(values, counts)
    deviation = _NORMAL * _median(np.abs(values - middle), counts)
    bound = FARTHEST * (1 + _FEW / counts) * deviation
    # More than half of the values are the same: nothing says what is far out.
    bound[(counts < _LEAST_VALUES) | ~(deviation > 0)] = np.inf
    return np.clip(values, middle - bound, middle + bound)


def _median(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The lower median of each column; NaN are sorted last."""
    return np.take_along_axis(np.sort(values, axis=0), (counts[None] - 1) // 2, 0)[0]


def sizes(schema: Schema) -> dict[str, int]:
    """How many numbers each part of ``Statistics`` but the rows has."""
    quantities, categories = _places(schema)
    return {
        "quantiles": len(schema.ranked) * len(LEVELS),
        "present": len(schema.kept),
        "mean": len(quantities),
        "rest": len(quantities),
        "variance": len(quantities),
        "shares": sum(categories.values()),
    }


def finish(schema: Schema, clients: Sequence[Statistics]) -> Preprocessing:
    """The preprocessing of the statistics of all clients."""
    rows = np.array([one.rows for one in clients], np.float64)
    weights = rows / max(rows.sum(), 1.0)
    present, means, rests, variances, shares, quantiles = (
        np.stack(parts) for parts in zip(*(one[1:] for one in clients), strict=True)
    )
    quantities, categories = _places(schema)
    # Clients count by the rows that have a value.
    having = weights[:, None] * present[:, quantities]
    having = having / np.maximum(having.sum(axis=0), np.finfo(np.float64).tiny)
    near = (having * means).sum(axis=0)
    away = (means - near) + rests
    shift = (having * away).sum(axis=0)
    mean = near + shift
    deviation = np.sqrt((having * (variances + (away - shift) ** 2)).sum(axis=0))
    deviation[deviation <= _CONSTANT * np.abs(mean)] = 0.0
    fitted = [Fitted(float(share)) for share in weights @ present]
    for number, place in enumerate(quantities):
        moments = float(mean[number]), float(deviation[number])
        fitted[place] = Fitted(fitted[place].present, *moments)
    parts = iter((weights @ shares).tolist())
    for place, size in categories.items():
        fitted[place] = fitted[place]._replace(shares=tuple(islice(parts, size)))
    for number, place in enumerate(schema.ranked):
        own = quantiles[:, number * len(LEVELS) : (number + 1) * len(LEVELS)]
        edges = _edges(own, weights * present[:, place])
        fitted[place] = fitted[place]._replace(edges=edges)
    return Preprocessing(schema, tuple(fitted))


def fit(schema: Schema, clients: Iterable[np.ndarray]) -> Preprocessing:
    """The preprocessing of the training rows of these clients, encoded."""
    return finish(schema, [client_statistics(schema, one) for one in clients])


def _places(schema: Schema) -> tuple[list[int], dict[int, int]]:
    """The columns that are quantities; those of categories, with their number."""
    found = {
        place: len(one.categories) + 1
        for place, one in enumerate(schema.kept)
        if one.encoding == "one_hot"
    }
    return [place for place in range(len(schema.kept)) if place not in found], found

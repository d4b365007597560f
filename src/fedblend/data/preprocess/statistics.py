# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The statistics of training rows that preprocessing needs: means, and only means.

Every client computes means over its own rows, and the statistics are means of these,
weighted by rows. So clients that never pool their rows, such as the nodes of a
federation, find the same preprocessing::

    preprocessing = finish(schema, [client_statistics(schema, one) for one in clients])

For each column these are the fraction of rows with a value, and the mean of the value
with its variance, or the fraction of each category. A client's variance is around its
own mean, which is exact for values that are large compared to their deviation. Around
the mean of all clients m, a client with mean m_i and variance v_i has v_i + (m_i - m)^2
(Chan, Golub and LeVeque 1983).

A few values far out would ruin mean and variance of a column. So a client first moves
them to a bound around its own median, in median absolute deviations. Other values, and
so the statistics of columns without such values, are not changed.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedblend.data.preprocess.preprocessing import FARTHEST, Fitted, Preprocessing
from fedblend.data.preprocess.schema import Columns, Schema

_CONSTANT = 8 * float(np.finfo(np.float64).eps)
"""A deviation relative to the mean that is rounding, and no deviation."""
_NORMAL = 1.4826
"""The deviation of a normal distribution in median absolute deviations."""
_LEAST_VALUES, _FEW = 5, 20
"""Values that have a median absolute deviation; so few make the bound twice as far."""


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


def client_statistics(schema: Schema, columns: Columns) -> Statistics:
    """The statistics of one client's training rows."""
    return statistics_of_encoded(schema, schema.encode(columns))


def statistics_of_encoded(schema: Schema, encoded: np.ndarray) -> Statistics:
    """The statistics of one client's training rows that are encoded."""
    rows, known = max(len(encoded), 1), ~np.isnan(encoded)
    quantities, categories = _places(schema)
    counted = known[:, quantities]
    counts = np.maximum(counted.sum(axis=0), 1)
    values = _without_outliers(np.asarray(encoded[:, quantities]), counts)
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
    )


def _without_outliers(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
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
    present = weights @ np.stack([one.present for one in clients])
    fitted = [Fitted(float(share)) for share in present]
    quantities, categories = _places(schema)
    for number, place in enumerate(quantities):
        # Clients count by the rows that have a value.
        having = weights * np.array([one.present[place] for one in clients])
        having = having / max(having.sum(), np.finfo(np.float64).tiny)
        means = np.array([one.mean[number] for one in clients])
        rests = np.array([one.rest[number] for one in clients])
        variances = np.array([one.variance[number] for one in clients])
        near = having @ means
        away = (means - near) + rests
        shift = having @ away
        mean = near + shift
        deviation = float(np.sqrt(having @ (variances + (away - shift) ** 2)))
        if deviation <= _CONSTANT * abs(mean):
            deviation = 0.0
        fitted[place] = fitted[place]._replace(mean=float(mean), deviation=deviation)
    shares, start = weights @ np.stack([one.shares for one in clients]), 0
    for place, size in categories.items():
        found = tuple(shares[start : start + size].tolist())
        fitted[place] = fitted[place]._replace(shares=found)
        start += size
    return Preprocessing(schema, tuple(fitted))


def fit(schema: Schema, clients: Iterable[Columns]) -> Preprocessing:
    """The preprocessing of the training rows of these clients."""
    return finish(schema, [client_statistics(schema, one) for one in clients])


def fit_encoded(schema: Schema, clients: Iterable[np.ndarray]) -> Preprocessing:
    """The preprocessing of clients whose training rows are encoded."""
    return finish(schema, [statistics_of_encoded(schema, one) for one in clients])


def _places(schema: Schema) -> tuple[list[int], dict[int, int]]:
    """The columns that are quantities; those of categories, with their number."""
    found = {
        place: len(one.categories) + 1
        for place, one in enumerate(schema.kept)
        if one.encoding == "one_hot"
    }
    return [place for place in range(len(schema.kept)) if place not in found], found

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The statistics of training rows that preprocessing needs: means, and only means.

Every row gives a vector, every client the mean of its rows' vectors, and the statistics
are the mean of these means, weighted by rows. So clients that never pool their rows,
such as the nodes of a federation, find the same preprocessing::

    first = combine([client_means(schema, one) for one in clients])
    second = combine([client_deviations(schema, one, first) for one in clients])
    preprocessing = finish(schema, first, second)

The first pass has, for each column, the fraction of rows with a value, and the mean of
the value (0 where it is missing) or the fraction of each category. The second pass has
the means of the deviation from the mean of the first pass, and of its square: exact
for values that are large compared to their deviation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedblend.data.preprocess.preprocessing import Fitted, Preprocessing
from fedblend.data.preprocess.schema import Columns, Schema

_CONSTANT = 8 * float(np.finfo(np.float64).eps)
"""A deviation relative to the mean that is rounding, and no deviation."""


class Means(NamedTuple):
    """The mean of a vector over rows."""

    rows: float
    """How many rows: the weight of the mean."""
    values: np.ndarray
    """float64 [width]. First pass: the fraction with a value of every kept column, the
    mean of every quantity, the fractions of every column of categories. Second pass:
    the deviation of every quantity, the squares."""


def client_means(schema: Schema, columns: Columns) -> Means:
    """The first pass over one client's training rows."""
    return means_of_encoded(schema, schema.encode(columns))


def client_deviations(schema: Schema, columns: Columns, first: Means) -> Means:
    """The second pass over one client's training rows, from everyone's first."""
    return deviations_of_encoded(schema, schema.encode(columns), first)


def means_of_encoded(schema: Schema, encoded: np.ndarray) -> Means:
    """The first pass over rows that are encoded."""
    rows, present = max(len(encoded), 1), ~np.isnan(encoded)
    quantities, categories = _places(schema)
    shares = [
        np.bincount(encoded[present[:, place], place].astype(np.int64), minlength=size)
        for place, size in categories.items()
    ]
    values = np.where(present, encoded, 0.0)[:, quantities]
    sums = [present.sum(axis=0), values.sum(axis=0), *shares]
    return Means(float(len(encoded)), np.concatenate(sums) / rows)


def deviations_of_encoded(schema: Schema, encoded: np.ndarray, first: Means) -> Means:
    """The second pass over rows that are encoded."""
    quantities = _places(schema)[0]
    values = encoded[:, quantities]
    away = np.where(np.isnan(values), 0.0, values - _centers(schema, first))
    sums = np.concatenate([away.sum(axis=0), (away**2).sum(axis=0)])
    return Means(float(len(encoded)), sums / max(len(encoded), 1))


def combine(means: Iterable[Means]) -> Means:
    """The mean over the rows of all clients."""
    every = list(means)
    weights = np.array([one.rows for one in every])
    total = weights.sum()
    parts = weights / total if total else weights
    return Means(float(total), parts @ np.stack([one.values for one in every]))


def finish(schema: Schema, first: Means, second: Means) -> Preprocessing:
    """The preprocessing of these statistics."""
    quantities, categories = _places(schema)
    present = first.values[: len(schema.kept)]
    fitted = [Fitted(float(share)) for share in present]
    shifts, squares = np.split(second.values, 2)
    for place, mean, shift, square in zip(
        quantities, _centers(schema, first), shifts, squares, strict=True
    ):
        shift = _ratio(shift, present[place])
        variance = max(_ratio(square, present[place]) - shift**2, 0.0)
        deviation = float(np.sqrt(variance))
        if deviation <= _CONSTANT * abs(mean):
            deviation = 0.0
        fitted[place] = fitted[place]._replace(
            mean=float(mean + shift), deviation=deviation
        )
    start = len(schema.kept) + len(quantities)
    for place, size in categories.items():
        shares = tuple(first.values[start : start + size].tolist())
        fitted[place] = fitted[place]._replace(shares=shares)
        start += size
    return Preprocessing(schema, tuple(fitted))


def fit(schema: Schema, clients: Iterable[Columns]) -> Preprocessing:
    """The preprocessing of the training rows of these clients."""
    return fit_encoded(schema, [schema.encode(one) for one in clients])


def fit_encoded(schema: Schema, clients: Sequence[np.ndarray]) -> Preprocessing:
    """The preprocessing of clients whose training rows are encoded."""
    first = combine(means_of_encoded(schema, one) for one in clients)
    second = combine(deviations_of_encoded(schema, one, first) for one in clients)
    return finish(schema, first, second)


def _places(schema: Schema) -> tuple[list[int], dict[int, int]]:
    """The columns that are quantities; those of categories, with their number."""
    sizes = {
        place: len(one.categories) + 1
        for place, one in enumerate(schema.kept)
        if one.encoding == "one_hot"
    }
    return [place for place in range(len(schema.kept)) if place not in sizes], sizes


def _centers(schema: Schema, first: Means) -> np.ndarray:
    """The mean of every quantity over the rows that have it, by the first pass."""
    quantities, kept = _places(schema)[0], len(schema.kept)
    sums = first.values[kept : kept + len(quantities)]
    pairs = zip(sums, first.values[:kept][quantities], strict=True)
    return np.array([_ratio(part, whole) for part, whole in pairs])


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0

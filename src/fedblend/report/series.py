# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The numbers of a page: columns and learning curves, rounded and thinned.

A column is rounded to a few more digits than the page shows. One with many values
holds whole numbers and a number of decimals, and the page divides: whole numbers are
shorter than fractions, so that a page of 10,000 clients stays small.

Learning curves come from the rows of ``metrics.jsonl``: means over seeds with the range
over seeds. Long curves are thinned; their first and last round stay.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedblend.metrics.registry import entry
from fedblend.report.measures import MODELS, Row, align_seeds, seeds_range, value_at

DIGITS = 6
"""Significant digits of a number that stands alone."""
DECIMALS = 4
"""Decimals that tables show; a column keeps at least as many."""
MOST_DECIMALS = 12

Column = dict[str, Any]
"""``{"d": decimals, "v": [whole numbers or None]}``."""


def round_all(values: Iterable[float]) -> list[float | None]:
    """Numbers to six significant digits; None where a number is not finite.

    >>> round_all([0.123456789, float("nan"), 2.0])
    [0.123457, None, 2]
    """
    return [number(value) for value in values]


def number(value: float | None) -> float | None:
    """One number to six significant digits, whole if it is; None if not finite."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def column(values: np.ndarray) -> Column:
    """Values as whole numbers and decimals, rounded as tables show them.

    >>> column(np.array([0.5, np.nan, 0.123456]))
    {'d': 4, 'v': [5000, None, 1235]}
    >>> column(np.array([12.0, 30.0])), column(np.array([0.00123456]))
    ({'d': 0, 'v': [12, 30]}, {'d': 6, 'v': [1235]})
    """
    known = values[np.isfinite(values)]
    decimals = 0
    if known.size and (known != np.rint(known)).any():
        size = math.floor(math.log10(float(np.abs(known).max())))
        decimals = DECIMALS
        if size < -1:  # as many digits of the largest
            decimals = min(DECIMALS - 1 - size, MOST_DECIMALS)
        elif size > 1:
            decimals = max(DIGITS - 1 - size, 0)
    scale = 10**decimals
    # ``round`` is exact on ties of binary fractions, a product is not.
    whole = [
        round(round(value, decimals) * scale) if math.isfinite(value) else None
        for value in values.tolist()
    ]
    return {"d": decimals, "v": whole}


def numeric(cells: Sequence[str]) -> np.ndarray | None:
    """The cells as numbers, NaN where empty; None where a cell is no number."""
    try:
        return np.array([float(cell) if cell else math.nan for cell in cells], float)
    except ValueError:
        return None


MOST_POINTS = 500
"""Points of a curve; a page shows no more than it has pixels."""
LINES = ("mean", "worst_tenth")
"""Which statistics over clients have a curve."""
COUNTS = ("bits_up", "bits_down", "seconds", "received", "dropped", "rejected")


def learning_curves(rows: Sequence[Row], most: int = MOST_POINTS) -> dict[str, Any]:
    """What a run measured by round, and what it had cost by then.

    Args:
        rows: of ``metrics.jsonl``, of one seed or of several.
        most: points of a curve.

    Returns:
        ``round``, a list for each count, and ``lines``: split, model, metric and
        statistic of each curve with ``v``, and ``low`` and ``high`` where seeds differ.
    """
    table = align_seeds(rows)
    table = [table[place] for place in _thin(len(table), most)]
    found: dict[str, Any] = {"round": [at[0]["round"] for at in table]}
    for name in COUNTS if table else ():
        values, _, _ = seeds_range(table, name)
        if np.isfinite(values).any():
            found[name] = round_all(values)
    found["lines"] = [
        {"split": split, "model": model, "metric": metric, "of": of, **values}
        for split, models in (rows[-1]["measures"] if rows else {}).items()
        for model in MODELS
        if model in models
        for metric in models[model]
        for of in LINES
        if (values := _line(table, ("measures", split, model, metric, of)))
    ]
    return found


def _thin(count: int, most: int) -> list[int]:
    """Places of at most so many of these points, evenly, with both ends.

    >>> _thin(5, 3), _thin(2, 3)
    ([0, 2, 4], [0, 1])
    """
    if count <= most:
        return list(range(count))
    return sorted({round(place) for place in np.linspace(0, count - 1, most)})


def _line(table: list[list[Row]], path: tuple[str, ...]) -> dict[str, Any]:
    """One curve; empty where nothing finite was measured."""
    mean, low, high = seeds_range(table, *path)
    if not np.isfinite(mean).any() and not np.isfinite(low).any():
        return {}
    found: dict[str, Any] = {"v": round_all(mean)}
    if (high > low).any():
        found |= {"low": round_all(low), "high": round_all(high)}
    return found


def higher_is_better(spread: Any, metric: str) -> bool:
    """Which way a metric is better, by its name or from its worst and best client.

    >>> higher_is_better({"worst": 1, "best": 1}, "log_loss")
    False
    >>> higher_is_better({"worst": 0.2, "best": 0.9}, "a metric of one's own")
    True
    """
    known = entry(metric)
    if known is not None:
        return known.facts.higher_is_better
    return not value_at(spread, "best") < value_at(spread, "worst")

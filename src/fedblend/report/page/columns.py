# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers, short: rounded to more digits than the page shows.

A column of many values is whole numbers and a number of decimals; the page divides. A
whole number is shorter than its fraction, and a page of 10,000 clients stays small.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

DIGITS = 6
"""Significant digits of a number that stands alone."""
DECIMALS = 4
"""Decimals that tables show; a column keeps at least as many."""
MOST_DECIMALS = 12

Column = dict[str, Any]
"""``{"d": decimals, "v": [whole numbers or None]}``."""


def rounded(values: Iterable[float]) -> list[float | None]:
    """Numbers to six significant digits; None where a number is not finite.

    >>> rounded([0.123456789, float("nan"), 2.0])
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

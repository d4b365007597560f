# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The values of a raw column: which are missing, and how texts are read.

A text is a number ("plain": ``1.5``; "thousands": ``1,234.5``; "decimal comma":
``1.234,5``; with or without a percent or currency sign, or as a bound such as ``> 89``
or ``90+``), a date ("iso", or a format of
``strptime``), a truth value ("yes", "no" and the like), or a word.
"""

import datetime
import re
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

_NOT_A_NUMBER = (
    "NaN",
    "nan",
    "-NaN",
    "-nan",
    "1.#IND",
    "-1.#IND",
    "1.#QNAN",
    "-1.#QNAN",
)
_NOT_AVAILABLE = ("NA", "N/A", "n/a", "na", "#N/A", "#N/A N/A", "#NA", "<NA>")
_NOTHING = ("", "NULL", "null", "None", "NaT", "?", "-", "--", ".")
MISSING = frozenset((*_NOT_A_NUMBER, *_NOT_AVAILABLE, *_NOTHING))
"""Texts that mean "no value": those of pandas, and a few more."""

TRUE = frozenset(("yes", "y", "true", "t", "on"))
FALSE = frozenset(("no", "n", "false", "f", "off"))

_DIGITS = r"[0-9]+"
_NUMBERS = {
    "plain": re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
    "thousands": re.compile(
        rf"[+-]?({_DIGITS}|[1-9][0-9]{{0,2}}(,[0-9]{{3}})+)(\.[0-9]+)?"
    ),
    "decimal comma": re.compile(
        rf"[+-]?({_DIGITS}|[1-9][0-9]{{0,2}}([. ][0-9]{{3}})+)(,[0-9]+)?"
    ),
}
NUMBER_STYLES = tuple(_NUMBERS)
_BOUND = re.compile(r"^[<>≤≥]=?\s*|\+$")

_DAYS = ("%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%d %b %Y")
_DAYS = (*_DAYS, "%d-%b-%Y", "%b %d, %Y")
_TIMES = ("", " %H:%M", " %H:%M:%S")
DATE_STYLES = ("iso", *(day + time for day in _DAYS for time in _TIMES))
"""In the order in which they are preferred: month before day where both would do."""

_EPOCH = datetime.datetime(1970, 1, 1)
_DAY_SECONDS = 86400.0


class Factors(NamedTuple):
    """A column as numbers of its different values; -1 where a value is missing."""

    codes: np.ndarray
    values: list[Any]

    @property
    def counts(self) -> np.ndarray:
        """How often each value occurs."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self.values))

    def lookup(self, numbers: Sequence[float] | np.ndarray) -> np.ndarray:
        """A number for each row from one for each value; NaN where it is missing."""
        return np.append(np.asarray(numbers, np.float64), np.nan)[self.codes]


def factorize(column: np.ndarray) -> Factors:
    """The different values of a column of objects or texts, in order of appearance."""
    known: dict[tuple[type, Any], int] = {}

    def code(value: Any) -> int:
        value = value.strip() if isinstance(value, str) else value
        return (
            -1
            if is_missing(value)
            else known.setdefault((type(value), value), len(known))
        )

    stored = column.tolist()
    if {*map(type, stored)} <= {str, type(None)}:
        find = {value: code(value) for value in dict.fromkeys(stored)}.__getitem__
    else:
        find = lru_cache(None, typed=True)(code)  # 1, 1.0 and True are different values
        stored = (one if isinstance(one, Hashable) else str(one) for one in stored)
    codes = np.fromiter(map(find, stored), np.int64, len(column))
    return Factors(codes, [value for _, value in known])


def is_missing(value: Any) -> bool:
    """Whether this is no value: None, NaN, pandas' NA, or a text of ``MISSING``."""
    if value is None or isinstance(value, str):
        return value is None or value in MISSING
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value


def word(value: Any) -> str:
    """A value as the name of a category: 3 and 3.0 are the same, True and "true"."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    return text.lower() if text.lower() in ("true", "false") else text


def number(value: Any, style: str) -> float:
    """A value as a number; NaN where it is none in this style."""
    if isinstance(value, int | float):
        return float(value)
    text = str(value).replace("\N{NO-BREAK SPACE}", " ").strip()
    text = _BOUND.sub("", text.removesuffix("%").strip("$€£ "))
    if not _NUMBERS[style].fullmatch(text):
        return np.nan
    if style == "thousands":
        text = text.replace(",", "")
    elif style == "decimal comma":
        text = text.replace(".", "").replace(" ", "").replace(",", ".")
    return float(text)


def is_bound(value: Any) -> bool:
    """Whether a value is a text of a bound, such as "> 89" or "90+"."""
    return isinstance(value, str) and _BOUND.search(value.strip()) is not None


def truth(value: Any, style: str = "") -> float:
    """1 or 0 for a truth value; NaN where it is none."""
    del style
    text = word(value).lower()
    if text in TRUE or text in FALSE:
        return float(text in TRUE)
    found = number(text, "plain")
    return found if found in (0.0, 1.0) else np.nan


def date(value: Any, style: str) -> float:
    """The days since 1970 began (in UTC); NaN where a value is no date."""
    try:
        if isinstance(value, datetime.datetime):
            moment = value
        elif isinstance(value, datetime.date):
            moment = datetime.datetime(value.year, value.month, value.day)
        elif not isinstance(value, str):
            return np.nan
        elif style == "iso":
            if not re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
                return np.nan
            moment = datetime.datetime.fromisoformat(value)
        else:
            moment = datetime.datetime.strptime(value, style)
        if moment.tzinfo is not None:
            moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
        return (moment - _EPOCH).total_seconds() / _DAY_SECONDS
    except (ValueError, OverflowError):
        return np.nan


def best_style(
    read: Callable[[Any, str], float],
    styles: Sequence[str],
    values: Sequence[Any],
    counts: np.ndarray,
) -> tuple[str, np.ndarray, list[str]]:
    """The style in which most rows can be read, and the styles that do as well.

    Returns:
        The style, what it makes of each value (NaN of some), and the other styles that
        read as many rows to other values.
    """
    best, found, equal = styles[0], np.full(len(values), np.nan), []
    most = 0
    # A few values tell most styles apart; only what reads one of them is tried on all.
    probe = values[:20]
    for style in styles:
        if np.isnan([read(value, style) for value in probe]).all():
            continue
        numbers = np.array([read(value, style) for value in values])
        rows = counts[~np.isnan(numbers)].sum()
        if rows > most:
            best, found, equal, most = style, numbers, [], rows
        elif rows == most and not np.array_equal(numbers, found, equal_nan=True):
            equal.append(style)
    return best, found, equal

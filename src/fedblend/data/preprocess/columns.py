# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One column of a raw table: what it holds, and as which numbers it is encoded.

A column is encoded as one float64 number a row, NaN where a value is missing: a number
as itself, a truth value as 0 or 1, a date as days since 1970 began, a category as its
place in ``categories``. A category that is not among them is their count if they are
one-hot, and NaN if they have an order.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from fedblend.data.dataset import DataError
from fedblend.data.preprocess import values
from fedblend.data.preprocess.values import Factors

Kind = Literal["number", "boolean", "date", "text"]
Encoding = Literal["standardize", "as_is", "flag", "one_hot", "ordinal", "date", "drop"]

SCALED = ("standardize", "ordinal", "date")
"""Encodings whose first input is standardized and clipped."""
PERIODS = {"year": 365.2425, "week": 7.0, "day": 1.0}
"""The periods of a date that become a sine and a cosine, in days."""


class Column(NamedTuple):
    """What a column of the raw table is, and what becomes of it."""

    name: str
    kind: Kind
    """What its values are."""
    encoding: Encoding
    """What inputs are made of it; "drop" makes none."""
    style: str = ""
    """How its texts are read, see ``values``; then ``MISSING`` and such numbers."""
    categories: tuple[str, ...] = ()
    """The categories that have an input of their own, or a place in the order."""
    other: bool = False
    """Whether rarer categories share one more input."""
    missing: bool = False
    """Whether one more input says that the value is missing."""
    parts: tuple[str, ...] = ()
    """The periods of a date that are inputs; see ``PERIODS``."""
    seen: str = ""
    """What was found in it, in words."""
    why: str = ""
    """Why it is encoded so, where that is not plain."""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its inputs."""
        if self.encoding == "drop":
            return ()
        names = [self.name]
        if self.encoding == "one_hot":
            known = (*self.categories, *(["other"] if self.other else []))
            names = [f"{self.name}={category}" for category in known]
        for part in self.parts:
            names += [f"{self.name} {part} sin", f"{self.name} {part} cos"]
        return (*names, f"{self.name} missing") if self.missing else tuple(names)


class Found(NamedTuple):
    """The values of a column that was read without knowing what it is."""

    kind: Kind
    numbers: np.ndarray
    """As encoded, except for texts: there the number of the factor, NaN if missing."""
    style: str = ""
    words: tuple[str, ...] = ()
    """The different texts."""
    remark: str = ""


READERS: dict[str, Callable[[Any, str], float]] = {
    "number": values.number,
    "boolean": values.truth,
    "date": values.date,
}
MISSING = "missing "
"""Before the numbers that mean a missing value, in a choice and in a style."""
MIXED = 0.9
"""A column of numbers or dates may have texts in this fraction of rows less than 1."""
LEAST_NUMBERS = 10
"""Different numbers that such a mixed column needs."""
MOST_BOUNDS = 0.5
"""The part of rows that may be bounds, such as "> 89"; with more, they are words."""
_DAY = np.timedelta64(1, "D")
_LARGEST = float(np.finfo(np.float32).max)


def read_as(raw: np.ndarray, kind: Kind, style: str) -> np.ndarray:
    """The values of a raw column as numbers; NaN where there is none, or no such."""
    style, _, absent = style.partition(MISSING)
    if absent:
        numbers = read_as(raw, kind, style)
        return np.where(
            np.isin(numbers, [*map(float, absent.split())]), np.nan, numbers
        )
    if raw.dtype.kind in "biuf":
        numbers = raw.astype(np.float64)
        if kind == "boolean":
            numbers = np.where(np.isin(numbers, (0.0, 1.0)), numbers, np.nan)
        return _usable(numbers)
    if raw.dtype.kind == "M":
        days = (raw - np.datetime64(0, "D")) / _DAY
        return np.asarray(days, np.float64)
    if raw.dtype.kind == "m":
        return np.asarray(raw / _DAY, np.float64)
    usual = "iso" if kind == "date" else "plain"
    return _look_up(values.factorize(raw), READERS[kind], style or usual)


def _look_up(
    factors: Factors, read: Callable[[Any, str], float], style: str
) -> np.ndarray:
    return _usable(factors.lookup([read(value, style) for value in factors.values]))


def _usable(numbers: np.ndarray) -> np.ndarray:
    """NaN instead of what float32 cannot hold."""
    return np.where(np.abs(numbers) <= _LARGEST, numbers, np.nan)


def words_of(raw: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """The number of each row's category (NaN if missing), and the categories."""
    return _words(values.factorize(raw.astype(object)))


def _words(factors: Factors) -> tuple[np.ndarray, tuple[str, ...]]:
    words = [values.word(value) for value in factors.values]
    names = tuple(dict.fromkeys(words))
    places = {name: place for place, name in enumerate(names)}
    return factors.lookup([places[one] for one in words]), names


def identify(raw: np.ndarray) -> Found:
    """What a column of unknown content holds."""
    if raw.dtype.kind == "b":
        return Found("boolean", read_as(raw, "boolean", ""))
    if raw.dtype.kind in "iuf":
        return _numbers(read_as(raw, "number", ""))
    if raw.dtype.kind in "mM":
        kind = "date" if raw.dtype.kind == "M" else "number"
        return Found(kind, read_as(raw, kind, ""))
    factors = values.factorize(raw)
    stored = {_type_name(value) for value in factors.values}
    if len(stored) == 1 and "text" not in stored:
        (only,) = stored
        numbers = _look_up(factors, READERS[only], "")
        return _numbers(numbers) if only == "number" else Found(only, numbers)
    return _texts(factors)


def _type_name(value: Any) -> Any:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "date" if hasattr(value, "year") and hasattr(value, "month") else "text"


def _numbers(numbers: np.ndarray, style: str = "", remark: str = "") -> Found:
    """Numbers, which are truth values if all are 0 or 1."""
    present = numbers[~np.isnan(numbers)]
    both = len(present) and present.min() == 0 and present.max() == 1
    if both and np.isin(present, (0.0, 1.0)).all():
        return Found("boolean", numbers, style, remark=remark)
    return Found("number", numbers, style, remark=remark)


def _texts(factors: Factors) -> Found:
    """Texts that may be truth values, numbers or dates."""
    texts, counts = [values.word(value) for value in factors.values], factors.counts
    if not texts:
        return Found("text", factors.lookup([]))
    lowered = {text.lower() for text in texts}
    if len(lowered) == 2 and lowered & values.TRUE and lowered & values.FALSE:
        return Found("boolean", _look_up(factors, values.truth, ""))
    tried: dict[Kind, tuple[str, ...]] = {
        "number": values.NUMBER_STYLES,
        "date": values.DATE_STYLES,
    }
    for kind, styles in tried.items():
        style, read, others = values.best_style(
            READERS[kind], styles, factors.values, counts
        )
        odd = np.isnan(read)
        bounds = ~odd & [values.is_bound(value) for value in factors.values]
        numbers = _usable(factors.lookup(read))
        different = len(np.unique(numbers[~np.isnan(numbers)]))
        if (
            counts[~odd].sum() < MIXED * counts.sum()
            or (odd.any() and different < LEAST_NUMBERS)
            or counts[bounds].sum() > MOST_BOUNDS * counts.sum()
        ):
            continue
        remarks = [] if style in ("plain", "iso") else [f"read {_style_name(style)}"]
        if others:
            first = remarks[0] if remarks else ""
            remarks = [f"{first} (they would fit {_style_name(others[0])}, too)"]
        for some, meant in ((bounds, "their number"), (odd, "missing")):
            if some.any():
                example = texts[int(np.flatnonzero(some)[0])]
                number = counts[some].sum()
                remarks.append(f"{number} texts such as {example!r:.30} as {meant}")
        if kind == "number":
            return _numbers(numbers, style, ", ".join(remarks))
        return Found(kind, numbers, style, remark=", ".join(remarks))
    numbers, words = _words(factors)
    return Found("text", numbers, words=words)


def _style_name(style: str) -> str:
    named = {
        "plain": "as they are",
        "thousands": "with commas between thousands",
        "decimal comma": "with decimal commas",
    }
    return named.get(style, f"as {style}")


def encode(column: Column, raw: np.ndarray) -> np.ndarray:
    """A raw column as numbers.

    Raises:
        DataError: there are values, and not one can be read.
    """
    raw = np.asarray(raw)
    if column.encoding in ("one_hot", "ordinal"):
        numbers, words = words_of(raw)
        places = {name: place for place, name in enumerate(column.categories)}
        unknown = len(places) if column.encoding == "one_hot" else np.nan
        known = np.array([places.get(one, unknown) for one in words], np.float64)
        inside = ~np.isnan(numbers)
        numbers[inside] = known[numbers[inside].astype(np.int64)]
        return numbers
    numbers = read_as(raw, column.kind, column.style)
    if len(numbers) and np.isnan(numbers).all():
        present = [value for value in raw.tolist() if not values.is_missing(value)]
        # A client may have only numbers that mean missing.
        style, *_ = column.style.partition(MISSING)
        if present and np.isnan(read_as(raw, column.kind, style)).all():
            what = {"boolean": "a truth value"}.get(column.kind, f"a {column.kind}")
            raise DataError(
                f"column {column.name!r}: {present[0]!r:.40} is not {what}, and no "
                "other value is"
            )
    return numbers

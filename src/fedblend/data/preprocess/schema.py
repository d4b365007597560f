# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The schema of a raw table: what every column is, and the inputs made of it.

The schema has kinds, categories and names, and nothing that is computed from training
rows. It is fixed before rows are split, so that all splits have the same inputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from fedblend.data.dataset import AbsentColumnError, DataError
from fedblend.data.preprocess.columns import (
    MISSING,
    PERIODS,
    SCALED,
    Column,
    Encoding,
    Found,
    Kind,
    encode,
    identify,
    read_as,
    words_of,
)
from fedblend.data.readers.checks import ALL_DIFFER, names_an_id
from fedblend.errors import hint

Columns = Mapping[str, np.ndarray]
"""The columns of a raw table, by name: numbers, truth values, dates, or objects."""
Choice = str | Sequence[str]
"""What to make of a column: an ``Encoding`` but "flag", a date's format such as
"%d/%m/%Y", the categories of an order, from low to high, or "missing 0 999": numbers
that mean a missing value."""

CHOICES = tuple(name for name in get_args(Encoding) if name != "flag")

FEW = 10
"""So many categories, or fewer, all have an input of their own."""
MOST = 30
"""Categories that have an input of their own."""
RARE_ROWS, RARE_SHARE = 5, 0.005
"""One of many categories needs so many rows, and such a part of them."""
COVERED = 0.25
"""The part of rows whose categories are frequent; below it a text is no category."""
MISSING_ROWS, MISSING_SHARE = 5, 0.01
"""So many missing values, and such a part of rows, get an input of their own."""
LEAST_ROWS = 20
"""In fewer rows, integers may follow each other by chance."""


class EncodedColumns(np.ndarray):
    """Columns as a schema encodes them, which are no inputs of a model yet.

    A type of its own, so that nobody trains on the numbers of categories by mistake.
    """


class Schema(NamedTuple):
    """Every column of a raw table, dropped ones too."""

    columns: tuple[Column, ...]
    ranks: bool = False
    """Whether inputs with the rank of every number follow; see ``preprocessing``."""

    @property
    def kept(self) -> tuple[Column, ...]:
        """The columns that inputs are made of."""
        return tuple(one for one in self.columns if one.encoding != "drop")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kept columns."""
        return tuple(one.name for one in self.kept)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the inputs."""
        names = [name for one in self.kept for name in one.features]
        ranked = [self.kept[place].name for place in self.ranked]
        return (*names, *(f"{name} rank" for name in ranked))

    @property
    def ranked(self) -> tuple[int, ...]:
        """The places of the kept columns whose ranks are inputs."""
        if not self.ranks:
            return ()
        scaled = (one.encoding in SCALED for one in self.kept)
        return tuple(place for place, one in enumerate(scaled) if one)

    @property
    def width(self) -> int:
        """The number of inputs."""
        return len(self.features)

    def encode(self, columns: Columns) -> EncodedColumns:
        """The kept columns as float64 [rows, columns]; see ``preprocess.columns``."""
        for name in self.names:
            if name not in columns:
                raise AbsentColumnError(
                    name, f"there is no column {name!r}; {hint(name, columns)}"
                )
        encoded = [encode(one, columns[one.name]) for one in self.kept]
        return np.stack(encoded, axis=1).view(EncodedColumns)

    def records(self) -> list[dict[str, Any]]:
        """The columns as what JSON has, to store or to send; see ``read_records``."""
        return [one._asdict() for one in self.columns]

    @classmethod
    def read_records(cls, records: Sequence[Mapping[str, Any]]) -> "Schema":
        """The schema of these records.

        Raises:
            ValueError: they are no records of a schema.
        """
        try:
            columns = [
                Column(**{name: one[name] for name in Column._fields})
                for one in records
            ]
            return cls(tuple(_check_column(one) for one in columns))
        except (LookupError, TypeError, AttributeError):
            raise ValueError("this is not the record of a schema") from None


def _check_column(column: Column) -> Column:
    """A column from elsewhere, with tuples for lists."""
    texts = (column.name, column.style, column.seen, column.why)
    texts += (*column.categories, *column.parts)
    if not (
        all(isinstance(text, str) for text in texts)
        and column.kind in get_args(Kind)
        and column.encoding in get_args(Encoding)
        and {*column.parts} <= {*PERIODS}
        and {type(column.other), type(column.missing)} == {bool}
    ):
        raise ValueError(f"column {column.name!r:.40} is not in the schema")
    return column._replace(
        categories=tuple(column.categories), parts=tuple(column.parts)
    )


def schema_of(
    columns: Columns,
    choices: Mapping[str, Choice] | None = None,
    *,
    confirmed: bool = False,
) -> Schema:
    """What the columns of a raw table are, and what to make of them.

    Args:
        columns: all columns that may become inputs.
        choices: what to make of some of them; the others are decided here.
        confirmed: that all columns are meant to be inputs, ids too.

    Raises:
        DataError: a choice does not fit, or no column is left.
    """
    choices = choices or {}
    for name in choices:
        if name not in columns:
            raise DataError(
                f"preprocess: there is no column {name!r}; {hint(name, columns)}"
            )
    made = Schema(
        tuple(
            _choose(name, np.asarray(raw), choices[name])
            if name in choices
            else _decide(name, np.asarray(raw), confirmed)
            for name, raw in columns.items()
        )
    )
    if not made.kept:
        reasons = "; ".join(f"{one.name!r} {one.why}" for one in made.columns[:3])
        raise DataError(f"preprocess: no column is left to train on: {reasons}")
    return made


def _decide(name: str, raw: np.ndarray, confirmed: bool) -> Column:
    """What to make of a column that nobody chose for."""
    seen = identify(raw)
    present = seen.numbers[~np.isnan(seen.numbers)]
    rows, different = len(raw), len(np.unique(present))
    about = _column(name, seen, raw)
    if different == 0:
        return about._replace(encoding="drop", why="has no value")
    if different == 1 and len(present) == rows:
        return about._replace(encoding="drop", why="has one value only")
    id_name = names_an_id(name) and not confirmed
    if seen.kind == "number":
        whole = (present == np.rint(present)).all()
        if whole and different == rows >= LEAST_ROWS and not confirmed:
            if present.max() - present.min() == rows - 1:
                return about._replace(encoding="drop", why="numbers the rows")
            about = about._replace(why=ALL_DIFFER)
        if id_name and whole:
            return _name_ids(name, raw, about, different)
        return about
    if seen.kind == "text":
        return _text(about, seen, id_name)
    return about


def _name_ids(name: str, raw: np.ndarray, about: Column, different: int) -> Column:
    """A column of whole numbers that is an id by its name."""
    if different > MOST:
        return about._replace(encoding="drop", why="is an id by its name")
    numbers, words = words_of(raw)
    about = about._replace(encoding="one_hot", why="numbers that are names")
    return _text(about, Found("text", numbers, words=words), False)


def _text(about: Column, seen: Found, id_name: bool) -> Column:
    """Categories with an input each, or a text that is no category."""
    codes = seen.numbers[~np.isnan(seen.numbers)].astype(np.int64)
    counts = np.bincount(codes, minlength=len(seen.words))
    least = 1
    if len(counts) > FEW:
        least = max(RARE_ROWS, RARE_SHARE * len(seen.numbers))
    order = np.argsort(-counts, kind="stable")
    frequent = [int(place) for place in order[:MOST] if counts[place] >= least]
    if counts[frequent].sum() < COVERED * counts.sum():
        why = f"has {len(counts)} different texts, too many for categories"
        return about._replace(encoding="drop", why=why)
    if id_name and len(counts) > MOST:
        return about._replace(encoding="drop", why="is an id by its name")
    rare = len(counts) - len(frequent)
    return about._replace(
        categories=tuple(sorted(seen.words[place] for place in frequent)),
        other=rare > 0,
        why=f"{rare} rare categories share one input" if rare else about.why,
    )


def _column(name: str, seen: Found, raw: np.ndarray) -> Column:
    """A column with the usual encoding of its kind."""
    missing = int(np.isnan(seen.numbers).sum())
    said = [_kind_in_words(seen)]
    said += [seen.remark] if seen.remark else []
    said += [f"{missing} of {len(raw)} missing"] if missing else []
    encodings: dict[Kind, Encoding] = {
        "number": "standardize",
        "boolean": "flag",
        "date": "date",
        "text": "one_hot",
    }
    return Column(
        name,
        seen.kind,
        encodings[seen.kind],
        seen.style,
        missing=missing >= max(MISSING_ROWS, MISSING_SHARE * len(raw)),
        parts=_parts(seen.numbers) if seen.kind == "date" else (),
        seen=", ".join(said),
    )


def _kind_in_words(seen: Found) -> str:
    if seen.kind == "text":
        return f"text, {len(seen.words)} different"
    if seen.kind == "boolean":
        return "yes or no"
    present = seen.numbers[~np.isnan(seen.numbers)]
    if not len(present):
        return "nothing"
    low, high = present.min(), present.max()
    if seen.kind == "date":
        first, last = (np.datetime64(int(np.floor(day)), "D") for day in (low, high))
        return f"dates, {first} to {last}"
    return f"numbers, {low:.4g} to {high:.4g}"


def _parts(days: np.ndarray) -> tuple[str, ...]:
    """The periods that a column of dates covers, at least once and not at one point."""
    present = days[~np.isnan(days)]
    if not len(present):
        return ()
    span = present.max() - present.min()
    whole = np.floor(present)
    fits = {
        "year": span >= PERIODS["year"],
        "week": span >= PERIODS["week"] and len(np.unique(whole % 7)) > 1,
        "day": len(np.unique(present - whole)) > 1,
    }
    return tuple(name for name, fit in fits.items() if fit)


def _choose(name: str, raw: np.ndarray, choice: Choice) -> Column:
    """A column of which someone decided what to make."""
    seen = identify(raw)
    about = _column(name, seen, raw)._replace(why="chosen")
    if isinstance(choice, str) and choice.startswith(MISSING):
        return _column_with_gaps(name, raw, seen, choice)
    if not isinstance(choice, str) or choice in ("one_hot", "ordinal"):
        numbers, words = words_of(raw)
        if len(words) < 2:
            raise DataError(f"preprocess.{name}: fewer than 2 categories")
        about = about._replace(encoding="one_hot", style="", parts=())
        if choice == "one_hot":
            return _one_hot(about, Found("text", numbers, words=words))
        order = _sort(words) if isinstance(choice, str) else tuple(choice)
        return about._replace(encoding="ordinal", categories=order)
    if "%" in choice or choice == "date":
        style = choice if "%" in choice else seen.style
        days = read_as(raw, "date", style or "iso")
        if np.isnan(days).all() or (choice == "date" and seen.kind != "date"):
            raise DataError(f"preprocess.{name}: not one value is a date ({choice})")
        kept = _column(name, Found("date", days, style or "iso"), raw)
        return kept._replace(why="chosen")
    if choice not in CHOICES:
        raise DataError(
            f"preprocess.{name}: {choice!r} is unknown; allowed are "
            f"{', '.join(CHOICES)}, missing 0, a format such as %d/%m/%Y, a list of "
            "categories"
        )
    if choice == "drop":
        return about._replace(encoding="drop")
    if seen.kind not in ("number", "boolean"):
        raise DataError(
            f"preprocess.{name}: {choice} needs numbers, and there is {about.seen}"
        )
    return about._replace(encoding=cast(Encoding, choice))


def _column_with_gaps(name: str, raw: np.ndarray, seen: Found, choice: str) -> Column:
    """A column of numbers some of which mean a missing value."""
    style, absent = seen.style + choice, choice.removeprefix(MISSING)
    try:
        numbers = read_as(raw, "number", style)
    except ValueError:
        raise DataError(f"preprocess.{name}: {absent!r} are no numbers") from None
    if seen.kind not in ("number", "boolean"):
        raise DataError(
            f"preprocess.{name}: {choice} needs numbers, not {_kind_in_words(seen)}"
        )
    found = _decide(name, numbers, confirmed=True)
    return found._replace(style=style, why=f"{absent} read as missing")


def _one_hot(about: Column, seen: Found) -> Column:
    made = _text(about, seen, False)
    if made.encoding == "drop":
        raise DataError(f"preprocess.{about.name}: {made.why}")
    return made


def _sort(words: Sequence[str]) -> tuple[str, ...]:
    """Categories in order: by number where all are numbers."""
    try:
        return tuple(sorted(words, key=float))
    except ValueError:
        return tuple(sorted(words))

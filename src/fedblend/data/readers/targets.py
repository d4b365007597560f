# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The targets and client keys of rows: columns as stored, classes, real numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.data.dataset import NUMBERS, DataError, Dataset, Kind, Task
from fedblend.data.preprocess.values import MISSING, is_missing, number
from fedblend.data.readers.arrays import Raw
from fedblend.data.readers.tables import RawTable, column_of

NO_LABEL = MISSING - {"?", "-", "--", ".", "None", "na"}
"""Texts that are no label, nor the name of a client; "-" and "?" may well be."""
MOST_CLASSES = 10
"""Up to this many different whole numbers are classes; more are quantities."""
SKEWED = 1.0
"""Skewness from which numbers may be better on the log scale."""
ZEROS, FEW = 0.02, 10
"""The least share of zeros, and the most that half of the rows have, of what looks like
counts."""
RATIO = 10.0
"""Of the 95 % and the 5 % quantile: one order of magnitude (Weisberg's log rule)."""


def labels_of(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A column as numbers or as texts, and where it has a value.

    Numbers written with decimal commas or thousands separators are numbers, too.
    """
    if raw.dtype.kind in "biu":
        return raw, np.ones(len(raw), bool)
    if raw.dtype.kind == "f":
        return raw.astype(np.float64), ~np.isnan(raw)
    if raw.dtype.kind in "mM":
        return raw.astype(str), ~np.isnat(raw)
    stored = [one.strip() if isinstance(one, str) else one for one in raw.tolist()]
    present = np.array([not _is_none(one) for one in stored], bool)
    some = [one for one, there in zip(stored, present, strict=True) if there]
    if some and all(isinstance(one, bool | int | float) for one in some):
        made = np.array(some)
    else:
        made = _texts([str(one) for one in some])
    labels = np.zeros(len(stored), made.dtype)
    labels[present] = made
    return labels, present


def _is_none(value: Any) -> bool:
    return value in NO_LABEL if isinstance(value, str) else is_missing(value)


def _texts(texts: list[str]) -> np.ndarray:
    different = sorted(set(texts))
    if any("," in text for text in different):
        for style in ("thousands", "decimal comma"):
            numbers = {text: number(text, style) for text in different}
            if not np.isnan(list(numbers.values())).any():
                return np.array([numbers[text] for text in texts])
    return np.array(texts, str)


def label_rows(
    table: RawTable, labels_by_use: Mapping[str, Any], *, strict: bool
) -> tuple[dict[str, np.ndarray], np.ndarray, list[str]]:
    """Target, client and the like of every row that has them; which rows; and notes.

    Args:
        table: the rows.
        labels_by_use: of "target", "client", "time", "group": the name of a column,
            the labels themselves, or None.
        strict: refuse a row without them, instead of leaving it out.
    """
    kept, notes, found, names = np.ones(table.rows, bool), [], {}, []
    for use, one in labels_by_use.items():
        if one is None:
            continue
        name = one if isinstance(one, str) else use
        raw = table.columns[one] if isinstance(one, str) else column_of(one)
        names.append(name)
        if len(raw) != table.rows:
            raise DataError(
                f"{table.where}: {table.rows} rows, but {len(raw)} values of {name!r}"
            )
        labels, present = labels_of(raw)
        if strict and not present.all():
            row = int(np.flatnonzero(~present)[0])
            raise DataError(
                f"{table.where}: column {name!r} is empty in row {row} (counted from 0)"
            )
        if not present.all():
            absent = (~present).sum()
            notes.append(
                f"{Path(table.where).name}: left out {absent} of {table.rows} rows, "
                f"which have no {name!r}"
            )
            labels = _whole(labels, present)
        kept &= present
        found[use] = labels
    if table.rows and not kept.any():
        raise DataError(f"{table.where}: no row has {' and '.join(map(repr, names))}")
    return {use: labels[kept] for use, labels in found.items()}, kept, notes


def _whole(labels: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Integers that became real numbers because some are missing."""
    some = labels[present]
    if labels.dtype.kind != "f" or not np.isfinite(some).all():
        return labels
    if len(np.unique(some)) > MOST_CLASSES or (some % 1 != 0).any():
        return labels
    return np.where(present, labels, 0).astype(np.int64)


def make_dataset(
    raw: Raw, kind: Kind | None, where: str, name: str, log_shift: float | None = None
) -> Dataset:
    """The dataset with targets as class numbers or float32, by their kind."""
    values = raw.targets
    if len(values) == 0:
        raise DataError(f"{where}: there are no rows")
    real = np.issubdtype(values.dtype, np.floating)
    notes = raw.notes
    # pandas makes real numbers of integers.
    found = np.unique(values).tolist() if values.ndim == 1 else []
    if kind is None and real and found in ([0.0, 1.0], [-1.0, 1.0]):
        kind = "binary"
        notes += (
            f"{Path(where).name}: targets are {' and '.join(map(str, found))} "
            'only, and taken as two classes; kind = "regression" takes them as numbers',
        )
    whole = values.dtype.kind in "iu" and raw.columns
    if kind is None and whole and len(found) > MOST_CLASSES:
        kind = "regression"
        notes += (
            f"{Path(where).name}: targets are {len(found)} different whole numbers, "
            'and taken as numbers (regression); kind = "classes" takes them as classes',
        )
    known: dict[str, Any] = {
        "keys": raw.keys,
        "name": name,
        "columns": raw.columns,
        "notes": notes,
        "schema": raw.schema,
        "time": raw.time,
        "groups": raw.groups,
    }
    numbers = kind in NUMBERS or (kind is None and real)
    if log_shift is not None and (kind == "counts" or not numbers):
        what = "counts" if numbers else "classes"
        raise DataError(f"{where}: log_shift: is for numbers (regression), not {what}")
    if numbers:
        kind = kind or "regression"
        if not (np.issubdtype(values.dtype, np.number) or values.dtype == bool):
            raise DataError(
                f"{where}: {kind} needs numeric targets, not {values[0]!s:.40}"
            )
        if kind == "counts":
            check_counts(values, where)
            if not values.any():
                raise DataError(f"{where}: all {len(values)} counts are 0")
        largest = float(np.abs(values.astype(np.float64)).max(initial=0))
        if np.isfinite(largest) and largest > float(np.finfo(np.float32).max):
            raise DataError(
                f"{where}: a target is {largest:.3g}; at most 3.4e38 is used"
            )
        if log_shift is not None:
            values = take_logarithms(values, log_shift, where)
        targets = values.astype(np.float32)
        width = 1 if targets.ndim == 1 else targets.shape[1]
        rows, known["log_shift"] = (raw.inputs, targets), log_shift
        return Dataset(rows, kind, width, **known)
    if values.ndim != 1:
        raise DataError(
            f"{where}: class targets must be one a row, not of shape {values.shape}"
        )
    if real and not (np.isfinite(values) & (values == np.rint(values))).all():
        raise DataError(f"{where}: the targets are real numbers, not {kind}")
    names, codes = np.unique(values, return_inverse=True)
    if len(names) == 1:
        raise DataError(
            f"{where}: all {len(values)} targets are {names[0]}; at least 2 classes "
            "are needed"
        )
    if kind == "binary" and len(names) != 2:
        raise DataError(f"{where}: binary targets need 2 classes, not {len(names)}")
    kind = kind or ("binary" if len(names) == 2 else "classes")
    outputs = 1 if kind == "binary" else len(names)
    rows = (raw.inputs, codes.astype(np.int32))
    return Dataset(rows, kind, outputs, label_names=tuple(map(str, names)), **known)


def check_counts(values: np.ndarray, where: str) -> None:
    """Refuse numbers that are no counts."""
    if values.ndim != 1:
        raise DataError(f"{where}: counts must be one a row, not of {values.shape}")
    wrong = np.flatnonzero(~((values >= 0) & (values % 1 == 0)))
    if wrong.size:
        raise DataError(
            f"{where}: target {values[wrong[0]]:g} in row {wrong[0]} (counted from 0) "
            "is no count; counts are whole numbers from 0 on"
        )


def look_like_counts(values: np.ndarray) -> bool:
    """Whether numbers are likely counts of rare events: whole, small, skewed, some 0.

    >>> draw = np.random.default_rng(0)
    >>> rare, grades = draw.poisson(2.0, 99), draw.integers(0, 9, 99)
    >>> look_like_counts(rare), look_like_counts(grades)
    (True, False)
    """
    values = values.astype(np.float64).ravel()
    small = np.array([(values == number).sum() for number in range(3)])
    if (values < 0).any() or (values % 1 != 0).any() or not small.all():
        return False
    some_are_zero, few = small[0] >= ZEROS * len(values), np.median(values) < FEW
    return bool(some_are_zero and few and _skewness(values) >= SKEWED / 2)


def take_logarithms(values: np.ndarray, shift: float, where: str) -> np.ndarray:
    """The logarithms of numbers plus a shift."""
    moved = values.astype(np.float64) + shift
    if not (moved > 0).all():
        row = int(np.flatnonzero(~(moved > 0))[0])
        raise DataError(
            f"{where}: log_shift: target {values.flat[row]:g} in row {row} (counted "
            f"from 0) plus {shift:g} has no logarithm; numbers must be above {-shift:g}"
        )
    return np.log(moved)


def log_shift_of(values: np.ndarray) -> float | None:
    """What to add to skewed numbers before their logarithm; None if they stay linear.

    They go on the log scale if none is negative, they spread over more than one order
    of magnitude, and logarithms are less than half as skewed. One is added if there are
    zeros.

    >>> log_shift_of(np.exp(np.arange(-3, 4))), log_shift_of(np.arange(100.0))
    (0.0, None)
    """
    values = values.astype(np.float64).ravel()
    if not values.size or values.min() < 0 or np.ptp(values) == 0:
        return None
    shift = 0.0 if values.min() > 0 else 1.0
    low, high = np.quantile(values, [0.05, 0.95]) + shift
    skewness, after = _skewness(values), _skewness(np.log(values + shift))
    skewed = skewness > SKEWED and abs(after) < skewness / 2
    return shift if skewed and high > RATIO * low else None


def _skewness(values: np.ndarray) -> float:
    gap = values - values.mean()
    return float((gap**3).mean() / (gap**2).mean() ** 1.5)


def targets_of(values: np.ndarray, task: Task, where: str) -> np.ndarray:
    """Targets as in the task: real numbers, or numbers of its classes."""
    if task.kind in ("classes", "binary"):
        if values.ndim != 1:
            raise DataError(
                f"{where}: class targets must be one a row, not of shape {values.shape}"
            )
        return _class_numbers(values, task, where)
    if not np.issubdtype(values.dtype, np.number):
        raise DataError(f"{where}: targets must be numbers, not {values[0]!s:.40}")
    if task.kind not in NUMBERS:
        return values.astype(np.int32)
    if task.kind == "counts":
        check_counts(values, where)
    width = 1 if values.ndim == 1 else values.shape[1]
    if width != task.outputs:
        raise DataError(
            f"{where}: {width} targets a row, but the model was trained on "
            f"{task.outputs}"
        )
    if task.log_shift is not None:
        values = take_logarithms(values, task.log_shift, where)
    return values.astype(np.float32)


def _class_numbers(values: np.ndarray, task: Task, where: str) -> np.ndarray:
    """The class number of every row; without class names, targets are the numbers."""
    count = 2 if task.kind == "binary" else task.outputs
    names = task.labels or tuple(str(number) for number in range(count))
    # One file has 1 where another has 1.0: compare numbers by value.
    numeric = np.issubdtype(values.dtype, np.number)
    known = {_number(name) if numeric else name: n for n, name in enumerate(names)}
    found, which = np.unique(values, return_inverse=True)
    codes = [known.get(float(v) if numeric else str(v), -1) for v in found]
    if -1 in codes:
        allowed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise DataError(
            f"{where}: target {found[codes.index(-1)]!s:.40} is no class that the "
            f"model was trained on; these are {allowed}"
        )
    return np.array(codes, np.int32)[which]


def _number(name: str) -> float | str:
    try:
        return float(name)
    except ValueError:
        return name

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a dataset that training goes through with, but badly: warnings."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fedblend.data.dataset import Dataset

LEAST_ROWS = 20
"""In fewer rows, integers may all differ by chance."""
LARGEST = 1e3
"""Of an absolute value; also how many times smaller than usual a column may be."""
LARGE = 30.0
"""Of a column's mean absolute value: beyond it SGD with a usual rate is unstable."""
MOST_TELLING = 50
"""Different values of a column that may tell the target; more may do so by chance."""
TELLING = 0.98
"""Of a measure of one column alone: above it, the column is hardly an honest input."""
LEAST_OF_CLASS = 5
"""Rows of each of two classes; with fewer, a column may tell them apart by chance."""
MOST_ROWS = 10_000
"""Rows that are looked at for such columns."""
SHOWN = 2
"""Columns that a warning names."""

ALL_DIFFER = "all values differ"
"""Why a column of whole numbers may be an id."""

_ID = re.compile(
    r"|index|unnamed: \d+|__index_level_\d+__|row[ _]?(index|number|nr|no)"
    r"|(.*[ _.-])?(id|idx|uuid|guid)",
    re.IGNORECASE,
)
_CAMEL_ID = re.compile(r".*[a-z]I[dD]")


def index_like(dataset: Dataset) -> Iterator[str]:
    """A warning of integer columns that number or name rows instead of describing them.

    Training goes through with such inputs, but its result means little.
    """
    inputs, found = dataset.rows[0], []
    if dataset.schema is not None:  # which leaves out what is an id by its name
        differ = [one for one in dataset.schema.kept if one.why == ALL_DIFFER]
        found = [f"{one.name!r} ({ALL_DIFFER})" for one in differ]
    elif inputs.ndim == 2 and np.issubdtype(inputs.dtype, np.floating):
        whole = np.flatnonzero((inputs == np.rint(inputs)).all(axis=0))
        for column in whole.tolist():
            if _all_different(inputs[:, column]):
                found.append(f"{_name(dataset, column)} ({ALL_DIFFER})")
            elif dataset.columns and names_an_id(dataset.columns[column]):
                found.append(f"{_name(dataset, column)} (by its name)")
    if found:
        yield (
            f"inputs that look like an index or an id: {list_some(found)}; leave them "
            "out with drop, or name the columns that are meant in inputs"
        )


def tells_target(dataset: Dataset) -> Iterator[str]:
    """A warning of columns of a table that alone tell the target, or nearly so."""
    found = leaks(dataset)
    if found:
        shown = [f"{name!r} ({how})" for name, how in found.items()]
        names = ", ".join(f'"{name}"' for name in found)
        yield (
            f"inputs that alone tell the target: {list_some(shown)}; unless they are "
            f"known before the target is, leave them out: drop = [{names}]"
        )


def leaks(dataset: Dataset) -> dict[str, str]:
    """The columns of a table that alone tell the target, with the measure that says so.

    Such a column is often written down together with the target, or for one class only,
    so that where it is missing tells the target. The measure is the AUC of two classes,
    the accuracy of the most frequent class for several, and R^2 or the rank correlation
    of numbers.
    """
    inputs, targets = dataset.rows
    measure = _MEASURES.get(dataset.kind)
    if not dataset.columns or measure is None or targets.ndim != 1:
        return {}
    some = slice(None, None, max(len(inputs) // MOST_ROWS, 1))
    inputs, targets, found = np.asarray(inputs[some]), targets[some], {}
    for name, values in zip(dataset.columns, inputs.T, strict=True):
        known = ~np.isnan(values)
        if known.sum() >= LEAST_ROWS and known.mean() > 0.5 and np.ptp(values[known]):
            found[name] = measure(values[known], targets[known])
        if not found.get(name) and min(known.sum(), (~known).sum()) >= LEAST_ROWS:
            how = measure(known.astype(float), targets)
            found[name] = how and f"{how} by where it is missing"
    return {name: how for name, how in found.items() if how}


def _groups(values: np.ndarray) -> np.ndarray | None:
    """The number of each row's value where there are few different ones."""
    different, codes = np.unique(values, return_inverse=True)
    most = min(MOST_TELLING, len(values) // LEAST_ROWS)
    return codes if len(different) <= most else None


def _average_target(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The mean target of the rows with the same value; many values stay themselves."""
    codes = _groups(values)
    if codes is None:
        return values
    return (np.bincount(codes, targets) / np.bincount(codes))[codes]


def _tell_classes(values: np.ndarray, targets: np.ndarray) -> str:
    codes, rows = _groups(values), len(values)
    if codes is None:  # by the class of the row with the next smaller value
        ordered = targets[np.argsort(values, kind="stable")]
        right = 1 + (ordered[1:] == ordered[:-1]).sum()
    else:
        counts = np.zeros((codes.max() + 1, targets.max() + 1))
        np.add.at(counts, (codes, targets), 1)
        right = counts.max(axis=1).sum()
    usual = np.bincount(targets).max()
    telling = right - usual > TELLING * (rows - usual) > 0
    return f"accuracy {right / rows:.4g}" if telling else ""


def _tell_two_classes(values: np.ndarray, targets: np.ndarray) -> str:
    from scipy.stats import rankdata

    ones = int(targets.sum())
    zeros = len(targets) - ones
    if min(ones, zeros) < LEAST_OF_CLASS:
        return ""
    ranks = rankdata(_average_target(values, targets))
    auc = (ranks[targets == 1].mean() - (ones + 1) / 2) / zeros
    auc = max(auc, 1 - auc)
    return f"AUC {auc:.4g}" if auc > TELLING else ""


def _tell_numbers(values: np.ndarray, targets: np.ndarray) -> str:
    from scipy.stats import spearmanr

    if np.allclose(values, targets, rtol=1e-6):
        return "equals it"
    means = _average_target(values, targets)
    if np.ptp(targets) == 0 or np.ptp(means) == 0:
        return ""
    straight = np.corrcoef(means, targets)[0, 1] ** 2
    if straight > TELLING:
        return f"R^2 {straight:.4g}"
    ranks: Any = spearmanr(values, targets)[0]
    return f"rank correlation {ranks:.4g}" if abs(ranks) > TELLING else ""


_MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], str]] = {
    "classes": _tell_classes,
    "binary": _tell_two_classes,
    "regression": _tell_numbers,
    "counts": _tell_numbers,
}
"""By kind of targets: how a column alone tells them; empty where it does not."""


def names_an_id(name: str) -> bool:
    """Whether a column of this name numbers or names rows.

    >>> names_an_id("patient_id"), names_an_id("age")
    (True, False)
    """
    return bool(_ID.fullmatch(name) or _CAMEL_ID.fullmatch(name))


def _all_different(values: np.ndarray) -> bool:
    rows = len(values)
    if rows < LEAST_ROWS or values.max() - values.min() < rows - 1:
        return False
    return len(np.unique(values)) == rows


def wild_scales(dataset: Dataset) -> Iterator[str]:
    """A warning of columns too large for a usual rate, or far smaller than others."""
    inputs = dataset.rows[0]
    if not np.issubdtype(inputs.dtype, np.floating) or dataset.schema is not None:
        return
    # The pixels of an image have one scale.
    rows = inputs if inputs.ndim == 2 else inputs.reshape(-1, 1)
    most = np.maximum(rows.max(axis=0), -rows.min(axis=0))
    mean = np.zeros(len(most))
    for column in np.flatnonzero(most > LARGE):
        mean[column] = np.abs(rows[:, column]).mean(dtype=np.float64)
    wild = (most > LARGEST) | (mean > LARGE)
    usual = most[~wild].max(initial=1.0)
    descending, ascending = (np.argsort(s * most, kind="stable") for s in (-1, 1))
    too_large = [
        f"{_name(dataset, column)} up to {most[column]:.4g} ({mean[column]:.3g} on "
        "average)"
        for column in descending
        if wild[column]
    ]
    too_small = [
        f"{_name(dataset, column)} at most {most[column]:.3g}"
        for column in ascending
        if 0 < most[column] < usual / LARGEST
    ]
    parts = [list_some(found) for found in (too_large, too_small) if found]
    if parts:
        yield (
            f"inputs of wild scales: {'; '.join(parts)}; bring all of them to about "
            'the same size, such as mean 0 and deviation 1; preprocess = "always" does'
        )


def _name(dataset: Dataset, column: int) -> str:
    if dataset.rows[0].ndim != 2:
        return "values"
    return repr(dataset.columns[column]) if dataset.columns else f"column {column}"


def list_some(found: list[str]) -> str:
    """The first few of these, and how many more there are."""
    rest = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

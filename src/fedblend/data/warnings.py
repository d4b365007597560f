# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Warnings of inputs that training goes through with, but badly."""

import re
from collections.abc import Iterator

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
SHOWN = 2
"""Columns that a warning names."""

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
    inputs = dataset.rows[0]
    numbers = inputs.ndim == 2 and np.issubdtype(inputs.dtype, np.floating)
    if not numbers or dataset.schema is not None:
        return
    found = []
    for column in np.flatnonzero((inputs == np.rint(inputs)).all(axis=0)).tolist():
        name = dataset.columns[column] if dataset.columns else None
        if _all_different(inputs[:, column]):
            found.append(f"{_named(dataset, column)} (all values differ)")
        elif name is not None and names_an_id(name):
            found.append(f"{_named(dataset, column)} (by its name)")
    if found:
        yield (
            f"inputs that look like an index or an id: {_listed(found)}; name the "
            "columns that are meant in inputs, with or without them"
        )


def tells_target(dataset: Dataset) -> Iterator[str]:
    """A warning of columns of a raw table that alone give the class of every row.

    Such a column is often written down together with the target.
    """
    inputs, targets = dataset.rows
    if dataset.schema is None or dataset.kind not in ("classes", "binary"):
        return
    found = []
    for place, name in enumerate(dataset.columns):
        values = np.asarray(inputs[:, place])
        known = ~np.isnan(values)
        different, codes = np.unique(values[known], return_inverse=True)
        most = min(MOST_TELLING, known.sum() // LEAST_ROWS)
        if 2 <= len(different) <= most and known.mean() > 0.5:
            pairs = np.unique(np.stack([codes, targets[known]]), axis=1).shape[1]
            if pairs == len(different) and len(np.unique(targets[known])) > 1:
                found.append(repr(name))
    if found:
        yield (
            f"inputs that alone tell the target of every row: {_listed(found)}; leave "
            "them out of inputs unless they are known before the target is"
        )


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
    large = np.flatnonzero(wild)
    small = np.flatnonzero((most > 0) & (most < usual / LARGEST))
    too_large = [
        f"{_named(dataset, column)} up to {most[column]:.4g} ({mean[column]:.3g} on "
        "average)"
        for column in large[np.argsort(-most[large], kind="stable")]
    ]
    too_small = [
        f"{_named(dataset, column)} at most {most[column]:.3g}"
        for column in small[np.argsort(most[small], kind="stable")]
    ]
    parts = [_listed(found) for found in (too_large, too_small) if found]
    if parts:
        yield (
            f"inputs of wild scales: {'; '.join(parts)}; bring all of them to about "
            'the same size, such as mean 0 and deviation 1; preprocess = "always" does'
        )


def _named(dataset: Dataset, column: int) -> str:
    if dataset.rows[0].ndim != 2:
        return "values"
    return repr(dataset.columns[column]) if dataset.columns else f"column {column}"


def _listed(found: list[str]) -> str:
    rest = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

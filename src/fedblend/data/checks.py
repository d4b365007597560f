# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is odd about the inputs of a dataset, but no error: a line each.

Training goes through with such inputs, and what comes out means little.
"""

import re
from collections.abc import Iterator

import numpy as np

from fedblend.data.dataset import Dataset

LEAST_ROWS = 20
"""Of so few rows whole numbers differ by chance."""
LARGEST = 1e3
"""Of a single value; also how many times smaller than usual a column may be."""
LARGE = 30.0
"""Of a column's mean size: SGD with a usual rate is unstable beyond it."""
SHOWN = 2
"""Columns that a line names."""

_ID = re.compile(
    r"|index|unnamed: \d+|__index_level_\d+__|row[ _]?(index|number|nr|no)"
    r"|(.*[ _.-])?(id|idx|uuid|guid)",
    re.IGNORECASE,
)
_CAMEL_ID = re.compile(r".*[a-z]I[dD]")


def index_like(dataset: Dataset) -> Iterator[str]:
    """Columns of whole numbers that count or name rows instead of describing them."""
    inputs = dataset.rows[0]
    if inputs.ndim != 2 or not np.issubdtype(inputs.dtype, np.floating):
        return
    found = []
    for column in np.flatnonzero((inputs == np.rint(inputs)).all(axis=0)).tolist():
        name = dataset.columns[column] if dataset.columns else None
        if _all_different(inputs[:, column]):
            found.append(f"{_named(dataset, column)} (all values differ)")
        elif name is not None and (_ID.fullmatch(name) or _CAMEL_ID.fullmatch(name)):
            found.append(f"{_named(dataset, column)} (by its name)")
    if found:
        yield (
            f"inputs that look like an index or an id: {_listed(found)}; name the "
            "columns that are meant in inputs, with or without them"
        )


def _all_different(values: np.ndarray) -> bool:
    rows = len(values)
    if rows < LEAST_ROWS or values.max() - values.min() < rows - 1:
        return False
    return len(np.unique(values)) == rows


def wild_scales(dataset: Dataset) -> Iterator[str]:
    """Columns larger than a usual rate allows, or far smaller than usual ones."""
    inputs = dataset.rows[0]
    if not np.issubdtype(inputs.dtype, np.floating):
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
    parts = []
    if large.size:
        worst = large[np.argsort(-most[large], kind="stable")]
        sizes = [
            f"{_named(dataset, c)} up to {most[c]:.4g} ({mean[c]:.3g} on average)"
            for c in worst
        ]
        parts.append(_listed(sizes))
    if small.size:
        worst = small[np.argsort(most[small], kind="stable")]
        sizes = [f"{_named(dataset, c)} at most {most[c]:.3g}" for c in worst]
        parts.append(_listed(sizes))
    if parts:
        yield (
            f"inputs of wild scales: {'; '.join(parts)}; bring all of them to about "
            "the same size, such as mean 0 and deviation 1"
        )


def _named(dataset: Dataset, column: int) -> str:
    if dataset.rows[0].ndim != 2:
        return "values"
    return repr(dataset.columns[column]) if dataset.columns else f"column {column}"


def _listed(found: list[str]) -> str:
    rest = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

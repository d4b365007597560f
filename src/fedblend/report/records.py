# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The records of a run as a tidy table: a line for each number that was measured."""

from collections.abc import Sequence
from typing import Any

from fedblend.errors import InputError
from fedblend.report.measures import Row

FIRST = ("seed", "round", "rounds", "seconds", "received", "dropped", "rejected")
"""The columns that all lines of a record share, besides the bits."""


def tidy(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each row, split, model and metric; all numbers of the row in each.

    A row without measures is one line.

    Args:
        rows: as of ``measures.rows_of``.
    """
    lines = []
    for row in rows:
        start = {name: row[name] for name in (*FIRST, "bits_up", "bits_down")}
        measured = [
            {"split": split, "model": model, "metric": metric, **spread}
            for split, models in row["measures"].items()
            for model, metrics in models.items()
            for metric, spread in metrics.items()
        ]
        lines += [start | one for one in measured or [{}]]
    return lines


def frame(rows: Sequence[Row]) -> Any:
    """The lines of ``tidy`` as a pandas frame."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise InputError("frame: needs pandas: pip install pandas") from None
    return pandas.DataFrame(tidy(rows))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.auto``: the comparison of a table that is a file, a frame or a mapping."""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.data.dataset import DataError
from fedblend.errors import UserError
from fedblend.runs.auto.candidates import Request
from fedblend.runs.auto.comparison import AutoComparison, Screen
from fedblend.runs.auto.folder import AutoResult

SCALES = (None, "log", "linear")
"""Of targets that are numbers."""


def auto(
    table: Any,
    *,
    client: str,
    target: str,
    minutes: float = 5.0,
    out: str | Path | None = None,
    kind: str | None = None,
    inputs: Sequence[str] = (),
    drop: Sequence[str] = (),
    scale: str | None = None,
    once: bool = False,
    keep: Sequence[str] = (),
    time: str | None = None,
    group: str | None = None,
    event: str | None = None,
    quiet: bool = False,
    screen: Screen | None = None,
) -> AutoResult:
    """Compare methods on a table, and say what to deploy, who gains, how sure that is.

    Args:
        table: the path of a .csv or .parquet file, a frame of pandas or polars, or a
            mapping from names to columns.
        client: column with the client of each row.
        target: column to predict.
        minutes: time budget in minutes.
        out: folder of all results; a temporary one if None. An interrupted comparison
            of the same table in this folder continues.
        kind: "classes", "binary", "regression" or "counts"; by the target's values if
            None.
        inputs: columns to predict from; all others if empty.
        drop: columns to leave out, such as an identifier or a second outcome.
        scale: "log" or "linear", of a target that is a number; by its values if None.
        once: compare linear methods from letters, which clients write once for
            numbers, and some times for classes.
        keep: columns that are neither dropped nor read otherwise by what looks at them.
        time: column of dates or numbers; test rows are the last ones of each client.
        group: column whose rows of one value, such as a patient, are tested together.
        event: column that is 1 where an event was seen, 0 where it was not yet; the
            target is the time until then.
        quiet: print nothing.
        screen: callbacks instead of printing.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedblend-") if out is None else out)
    path = Path(table) if isinstance(table, str | Path) else _store(table, folder)
    if screen is None:
        screen = Screen() if quiet else Screen(print)
    if scale not in SCALES:
        raise UserError("scale", scale, '"log" or "linear"')
    if once and (time or group):
        raise DataError("once: holds out rows at random; leave out time and group")
    columns = tuple(inputs), tuple(drop)
    asked = Request(path, client, target, kind, *columns, scale, once or None)
    request = asked._replace(keep=tuple(keep), time=time, group=group, event=event)
    for key in ("kind", "scale", "once"):
        if event is not None and (value := getattr(request, key)) is not None:
            raise UserError(key, value, "left out where event is given")
    AutoComparison(request, folder, minutes, screen).complete()
    return AutoResult(folder)


def _store(frame: Any, folder: Path) -> Path:
    """A frame as a file, which configurations can name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "table.csv"
    fresh = folder / "table.csv.part"
    fresh.unlink(missing_ok=True)
    if hasattr(frame, "to_csv"):
        frame.to_csv(fresh, index=False)
    elif hasattr(frame, "write_csv"):
        frame.write_csv(fresh)
    elif isinstance(frame, Mapping):
        with fresh.open("x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(frame)
            writer.writerows(zip(*map(np.asarray, frame.values()), strict=True))
    else:
        raise DataError(
            f"table: {type(frame).__name__} is no path, no frame of pandas or polars, "
            "and no mapping from names to columns"
        )
    return fresh.replace(path)

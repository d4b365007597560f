# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fb.auto``: the comparison of a table or frame, and what came out of it."""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.data.dataset import DataError
from fedblend.errors import RunError
from fedblend.report.page import write_page
from fedblend.runs import run_folder
from fedblend.runs.auto.candidates import Request
from fedblend.runs.auto.comparison import AutoComparison, Screen, method_rows
from fedblend.runs.saved_run import SavedRun, load


class AutoResult:
    """A finished comparison: its verdict, its methods, its models, its page.

    ``folder`` is where all of it lies; ``verdict`` has three sentences; ``deploy`` is
    the name of the method to deploy, None where nothing can be told.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._state = run_folder.read_json(folder / "auto.json")
        self.verdict: list[str] = self._state["verdict"]
        self.deploy: str | None = self._state["deploy"]
        self.metric: str = self._state["metric"]

    @property
    def metrics(self) -> list[str]:
        """What was measured on test rows; ``metric`` is the one that decides."""
        return [key[5:] for key in self.table[0] if key.startswith("test_")]

    @property
    def titles(self) -> dict[str, str]:
        """The methods in words, by name."""
        return {name: of["title"] for name, of in self._state["methods"].items()}

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each method: its settings, metrics and gain over training alone."""
        return method_rows(self._state)

    def frame(self) -> Any:
        """``table`` as a pandas frame."""
        import pandas

        return pandas.DataFrame(self.table)

    def run(self, method: str | None = None) -> SavedRun:
        """The saved run of a method, by default of the one to deploy."""
        return load(self._folder(method))

    def predict(self, rows: Any, *, client: str, method: str | None = None) -> Any:
        """Predictions for rows of a client, by its own model."""
        return self.run(method).predict(rows, client=client)

    def report(self, path: str | Path) -> Path:
        """Write the page to another place."""
        return write_page([self.folder], Path(path))

    def _folder(self, method: str | None) -> Path:
        found = self._state["findings"]
        chosen = method or self.deploy or (found and found["choice"]["method"])
        if not (self.folder / "runs" / str(chosen)).is_dir():
            kept = ", ".join(sorted(one.name for one in self.folder.glob("runs/*")))
            raise RunError(f"method: {chosen!r} has no run; there is {kept or 'none'}")
        return self.folder / "runs" / str(chosen)

    def __repr__(self) -> str:
        return "\n".join(self.verdict)


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
        kind: "classes", "binary" or "regression"; by the target's values if None.
        inputs: columns to predict from; all others if empty.
        drop: columns to leave out, such as an identifier or a second outcome.
        quiet: print nothing.
        screen: callbacks instead of printing.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedblend-") if out is None else out)
    path = Path(table) if isinstance(table, str | Path) else _store(table, folder)
    if screen is None:
        screen = Screen() if quiet else Screen(print)
    request = Request(path, client, target, kind, tuple(inputs), tuple(drop))
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

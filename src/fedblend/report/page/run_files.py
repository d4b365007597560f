# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The files of a run folder, read: what a page is made from."""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedblend.algorithms.local_only import local_only
from fedblend.errors import RunError
from fedblend.report.measures import Row
from fedblend.report.page.clients import ClientColumns, read_clients
from fedblend.runs.run_folder import Folder, read_json, read_rows, read_summary
from fedblend.stats.significance import LEVEL

DAMAGED = (KeyError, TypeError, AttributeError, IndexError, ValueError)

AUTO_ALONE = local_only.__name__
"""The folder in which ``fedblend auto`` keeps training alone."""

Plain = dict[str, Any]
Made = TypeVar("Made")


class RunFiles(NamedTuple):
    """What the files of a run folder hold."""

    folder: Folder
    text: str
    config: Plain
    rows: list[Row]
    summary: Plain | None
    """None while the run is not finished."""
    origin: Plain
    clients: ClientColumns | None
    preprocessing: Plain


def read_run(path: Path) -> RunFiles:
    """Read the folder of a run, finished or not.

    Raises:
        RunError: this is not the folder of a run, or a file is damaged.
    """
    folder = Folder(path)
    if not folder.config.is_file():
        raise RunError(f"{path}: is not the folder of a run (no config.toml)")
    try:
        text = folder.config.read_text()
        config = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise RunError(f"{folder.config}: is damaged: it is not TOML") from None
    finished = folder.summary.is_file()
    return RunFiles(
        folder,
        text,
        config,
        read_rows(folder) if folder.metrics.is_file() else [],
        read_summary(folder) if finished else None,
        read_json(folder.origin) if folder.origin.is_file() else {},
        read_clients(folder) if finished else None,
        _preprocessing(path),
    )


def _preprocessing(path: Path) -> Plain:
    """What was done to the columns of a table: of the first split."""
    files = [path / "preprocessing.json", *sorted(path.glob("preprocessing-*.json"))]
    return next((read_json(file) for file in files if file.is_file()), {})


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs, where a folder that holds ``runs`` stands for those."""
    found: list[Path] = []
    for path in paths:
        inner = sorted(path.glob("runs/*/config.toml"))
        is_run = (path / "metrics.jsonl").is_file() or not inner
        found += [path] if is_run else [file.parent for file in inner]
    return found


class Kept(NamedTuple):
    """What ``fedblend auto`` found in the folder that it wrote."""

    verdict: list[str]
    metric: str | None
    """The criterion."""
    titles: dict[str, str]
    """The methods by the names of their folders, the deployed one first."""
    tone: str
    """As of ``verdict.sentences``."""


def kept_verdict(paths: Sequence[Path]) -> Kept | None:
    """The verdict of ``fedblend auto``, where one was reached."""
    file = paths[0] / "auto.json" if len(paths) == 1 else None
    if file is None or not file.is_file():
        return None
    state = read_json(file)
    try:
        lines = [str(line) for line in state.get("verdict") or ()]
        if not lines or not state["findings"]:
            return None
        lines = [*map(str, state.get("warnings", ())), *lines]
        found = state["findings"]
        places = {path.name for path in run_folders(paths)}
        done = {name: of for name, of in state["methods"].items() if name in places}
        order = sorted(done, key=lambda name: name != found["choice"]["method"])
        titles = {name: str(done[name]["title"]) for name in order}
        tone = "open" if state["deploy"] is None else _tone(found)
        return Kept(lines, state["metric"], titles, tone)
    except DAMAGED:
        raise RunError(f"{file}: is damaged") from None


def _tone(found: Plain) -> str:
    """Whether taking part pays, by what ``fedblend auto`` found."""
    choice, (_, low, _) = found["choice"], found["mean_gain"]
    if choice["method"] == AUTO_ALONE:
        return "bad" if found["answer"] == "alone" else "open"
    if found["p"] is None or found["p"] >= LEVEL or low is None or low <= 0:
        return "open"
    return "mixed" if found["who"]["harmed"] else "good"


def checked(run: RunFiles, make: Callable[[RunFiles], Made]) -> Made:
    """Make something of a run; what does not fit is damage, in one line."""
    try:
        return make(run)
    except DAMAGED:
        raise RunError(f"{run.folder.path}: its results are damaged") from None

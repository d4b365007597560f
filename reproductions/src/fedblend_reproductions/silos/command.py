# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``fedblend board silos``: run its tables, write and check its page."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedblend.data.dataset import MissingDataError
from fedblend.errors import RunError
from fedblend.runs.run_folder import write_text
from fedblend_reproductions.silos.page import page
from fedblend_reproductions.silos.tables import TABLES, locate, prepare

NAME = "silos"


def run(
    names: Sequence[str],
    out: Path,
    folder: Path | None,
    minutes: float,
    deadline: float,
    say: Callable[[str], None],
) -> None:
    """Compare on tables, and write the page after each.

    Args:
        names: of the tables; a table whose file is not here is named and left out.
        out: folder of silos.json and silos.md.
        folder: of the files of tables.
        minutes: time budget of each table.
        deadline: by ``time.monotonic``; no table begins after it.
        say: takes lines of progress.
    """
    from fedblend_reproductions.silos.comparison import compare

    for name in names:
        if time.monotonic() > deadline:
            say(f"the budget is spent before {name}")
            return
        try:
            path = locate(name, folder)
        except MissingDataError as error:
            say(f"left out: {error}")
            continue
        say(f"{name}: {path}")
        with TemporaryDirectory() as place:
            table = prepare(name, path, Path(place))
            store(out, name, compare(TABLES[name], table, minutes, say))


def store(out: Path, name: str, entry: Any) -> None:
    """Write an entry, and the page."""
    path = out / f"{NAME}.json"
    found = {**(read(out) if path.exists() else {}), name: entry}
    order = [*TABLES, *found]
    found = dict(sorted(found.items(), key=lambda pair: order.index(pair[0])))
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found, allow_nan=False, indent=1) + "\n")
    write_page(out)


def read(out: Path) -> dict[str, Any]:
    """The entries of all tables in a folder."""
    path = out / f"{NAME}.json"
    if not path.exists():
        raise RunError(f"{path}: no such file; fedblend board {NAME} writes it")
    return json.loads(path.read_text())


def write_page(out: Path) -> None:
    """Write the page of the folder's entries; its guide stays."""
    path = out / f"{NAME}.md"
    guide = path.read_text() if path.exists() else ""
    write_text(path, page(read(out), guide))


def check(out: Path) -> int:
    """The number of tables on a page that is that of its JSON."""
    found, path = read(out), out / f"{NAME}.md"
    if not path.exists() or path.read_text() != page(found, path.read_text()):
        raise RunError(
            f"{path}: is not the page of {NAME}.json; fedblend board {NAME} --page "
            f"--out {out} writes it"
        )
    return len(found)

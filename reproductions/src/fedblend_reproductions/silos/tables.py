# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of the cross-silo board: all of them may be passed on.

fedblend ships one; the others are files in the folder ``tables`` of the data home, or
in another one that is named, with the checksums of ``datasets/catalog.toml``.
"""

import csv
import gzip
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedblend.cli.data import HEART
from fedblend.data.dataset import DataError, MissingDataError
from fedblend_reproductions.datasets.download import PUBLIC_SETS, data_home, is_intact

Columns = dict[str, list[str]]


class Silos(NamedTuple):
    """A table with natural clients; ``tables.toml`` says what its entries are."""

    title: str
    client: str
    target: str
    license: str
    source: str
    file: str = ""
    drop: tuple[str, ...] = ()
    anchors: Mapping[str, float] = {}


TABLES = {
    name: Silos(**entry)
    for name, entry in tomllib.loads(
        Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
    ).items()
}
"""By their names on the board."""


def locate(name: str, folder: Path | None = None) -> Path:
    """The path of a table's file, whose checksum is right.

    Args:
        name: of the table.
        folder: where it is; ``tables`` in the data home if None.
    """
    file = TABLES[name].file
    if not file:
        return HEART
    public = PUBLIC_SETS[file]
    if folder is not None:
        public = public._replace(folder=str(folder.absolute()))
    path = public.path(public.files[0])
    if path is None:
        raise MissingDataError(
            f"{name}: {public.files[0].name} is not in {data_home() / public.folder}; "
            f"{public.instruction}"
        )
    if not is_intact(public.files[0], path):
        raise DataError(
            f"{path}: is not the table of the board: the sha256 of its content must be "
            f"{public.files[0].checksum}"
        )
    return path


def write_table(name: str, path: Path, place: Path) -> None:
    """Write a table as the board compares it.

    Args:
        name: of the table.
        path: of its file.
        place: of the CSV file to write.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        first, *lines = csv.reader(file)
    columns = dict(zip(first, map(list, zip(*lines, strict=True)), strict=True))
    if name == "communities":
        columns = take_logarithms(columns, TABLES[name].target)
    with place.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def take_logarithms(columns: Columns, target: str) -> Columns:
    """Communities with crimes, these as logarithms.

    What counts crimes in another way, the columns from ``murders`` on, is left out, and
    what is not known of half of all communities.
    """
    kept = [place for place, value in enumerate(columns[target]) if _number(value) > 0]
    names = list(columns)
    found = {}
    for name in names[: names.index("murders")]:
        values = [columns[name][place] for place in kept]
        if 2 * sum(value not in ("", "?") for value in values) >= len(kept):
            found[name] = values
    logarithms = [math.log(float(columns[target][place])) for place in kept]
    return {**found, target: [repr(value) for value in logarithms]}


def _number(text: str) -> float:
    return float(text) if text not in ("", "?") else 0.0

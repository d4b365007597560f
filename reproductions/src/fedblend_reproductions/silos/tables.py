# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of the cross-silo board: all of them may be passed on.

fedblend ships one; the others are files in the folder ``tables`` of the data home, or
in another one that is named, with the checksums of ``datasets/catalog.toml``.
"""

import csv
import math
import tomllib
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from fedblend.cli.data import HEART
from fedblend.data.dataset import DataError, MissingDataError, open_unpacked
from fedblend_reproductions.datasets.download import PUBLIC_SETS, data_home, is_intact


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


def prepare(name: str, path: Path, folder: Path) -> Path:
    """The path of a table as the board compares it: its own, or one in ``folder``.

    Crimes are logarithms, of the communities that have some. What counts crimes in
    another way, the columns from ``murders`` on, is left out, and what is not known of
    half of these communities.
    """
    if name != "communities":
        return path
    with TextIOWrapper(open_unpacked(path), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    known, names = TABLES[name], list(rows[0])
    target = known.target
    rows = [row for row in rows if row[target] and float(row[target]) > 0]
    kept = [
        one
        for one in names[: names.index("murders")]
        if one in known.drop or 2 * sum(row[one] != "" for row in rows) >= len(rows)
    ]
    place = folder / "communities.csv"
    with place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*kept, target])
        for row in rows:
            logarithm = math.log(float(row[target]))
            writer.writerow([*(row[one] for one in kept), logarithm])
    return place

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The clients of a run as columns, from ``clients.csv`` and ``harm.csv``.

Values are means over seeds; gains, intervals and verdicts are those of ``harm.csv``.
Harmed clients come first, and those that lose most of them.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.errors import RunError, hint
from fedblend.report.series import column, numeric
from fedblend.runs.run_folder import Folder, read_table

STATUS = ("harmed", "unsure", "gains", "unknown", "not finite")
"""What a client's interval says of its gain; a page holds the place in this list."""
FACTS = ("train", "validation", "test", "alpha", "bits_up", "bits_down")
"""The columns that come first."""
MATTER_MOST = ("train", "alpha", "test")
"""Facts without which the charts of a page are empty."""
MOST_NAMED = 20
"""Clients that an error names."""
LEFT_OUT = ("seed", "id", "name", "training")
"""Columns of ``clients.csv`` that stand elsewhere."""


class ClientColumns(NamedTuple):
    """The clients of a run; arrays are over clients."""

    ids: list[int]
    names: list[str]
    unseen: np.ndarray
    """Who took no part in training."""
    columns: dict[str, np.ndarray]
    """Every number of ``clients.csv``, mean over seeds."""
    gains: dict[str, np.ndarray]
    """``local``, ``local_low``, ``local_high`` and so on, by the other model."""
    reference: str | None
    """The other model that a verdict compares with; None without any."""
    metric: str | None
    """The metric of the gains."""

    @property
    def status(self) -> np.ndarray:
        """The place in ``STATUS`` of each client."""
        if self.reference is None:
            return np.full(len(self.ids), STATUS.index("unknown"))
        return status(self.gains, self.reference)


def read_clients(folder: Folder) -> ClientColumns | None:
    """The clients of a run; None where the run has no table of them."""
    table = _columns(folder.clients)
    if not table:
        return None
    try:
        return _clients(table, _columns(folder.harm))
    except (KeyError, ValueError, IndexError):
        raise RunError(f"{folder.clients}: is damaged") from None


def _columns(path: Path) -> dict[str, list[str]]:
    """A CSV file by columns; empty where there is none."""
    rows = read_table(path) if path.is_file() else []
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _clients(table: dict[str, list[str]], harm: dict[str, list[str]]) -> ClientColumns:
    own = list(map(int, table["id"]))
    order = {client: None for client in [*map(int, harm.get("id", ())), *own]}
    place = {client: number for number, client in enumerate(order)}
    rows = np.array([place[client] for client in own])
    names, unseen = [""] * len(place), np.zeros(len(place), bool)
    for line, at in enumerate(rows):
        names[at] = table["name"][line]
        unseen[at] = table.get("training", {line: ""})[line] == "unseen"
    columns = {}
    for name, cells in table.items():
        values = None if name in LEFT_OUT else numeric(cells)
        if values is not None:
            columns[name] = _mean_over_seeds(values, rows, len(place))
    gains, reference = _gains(harm, len(place))
    metric = next(
        (key.removeprefix("personal_") for key in harm if key.startswith("personal_")),
        None,
    )
    first = {name: columns[name] for name in FACTS if name in columns}
    found = ClientColumns(
        list(place), names, unseen, first | columns, gains, reference, metric
    )
    return (
        found
        if reference is None
        else take_clients(found, _harm_order(found, reference))
    )


def _harm_order(clients: ClientColumns, other: str) -> np.ndarray:
    """The order of clients: broken and harmed ones first, then by their gain."""
    worst = np.isin(
        clients.status, [STATUS.index("harmed"), STATUS.index("not finite")]
    )
    gain = clients.gains[other]
    return np.lexsort((np.arange(len(gain)), np.nan_to_num(gain, nan=np.inf), ~worst))


def _mean_over_seeds(values: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """The mean of each client's finite values; NaN where it has none."""
    known = np.isfinite(values)
    total = np.bincount(rows[known], values[known], count)
    with np.errstate(invalid="ignore", divide="ignore"):
        return total / np.bincount(rows[known], minlength=count)


def _gains(
    harm: dict[str, list[str]], count: int
) -> tuple[dict[str, np.ndarray], str | None]:
    """The gains over each other model and the first of those models."""
    found: dict[str, np.ndarray] = {}
    others = [
        name.removeprefix("gain_over_")
        for name in harm
        if name.startswith("gain_over_") and not name.endswith(("_low", "_high"))
    ]
    for number, other in enumerate(others):
        start = "gain" if number == 0 else f"gain_over_{other}"
        said = harm["harmed" if number == 0 else f"harmed_by_{other}"]
        cells = {
            other: harm[f"gain_over_{other}"],
            f"{other}_low": harm[f"{start}_low"],
            f"{other}_high": harm[f"{start}_high"],
            f"{other}_broken": ["1" if word == "not finite" else "0" for word in said],
        }
        for name, texts in cells.items():
            values = numeric(texts)
            if values is None:
                raise ValueError(name)
            found[name] = np.concatenate([values, np.full(count - len(values), np.nan)])
    return found, (others[0] if others else None)


def status(gains: dict[str, np.ndarray], other: str) -> np.ndarray:
    """What each client's interval says of its gain over another model.

    An end that rows leave open is an empty cell: it says nothing.
    """
    low, high = gains[f"{other}_low"], gains[f"{other}_high"]
    found = np.full(len(low), STATUS.index("unsure"))
    found[np.isnan(gains[other])] = STATUS.index("unknown")
    found[low > 0] = STATUS.index("gains")
    found[high < 0] = STATUS.index("harmed")
    found[gains[f"{other}_broken"] == 1] = STATUS.index("not finite")
    return found


def one_client(clients: ClientColumns, wanted: str, where: str) -> int:
    """The place of a client by its id or name.

    Raises:
        RunError: there is no such client, or several have this name.
    """
    places = [place for place, name in enumerate(clients.names) if name == wanted]
    if not places and wanted.isdecimal():
        places = [place for place, own in enumerate(clients.ids) if own == int(wanted)]
    if len(places) == 1:
        return places[0]
    if places:
        ids = ", ".join(str(clients.ids[place]) for place in places[:5])
        raise RunError(f"{where}: several clients are named {wanted!r}, with ids {ids}")
    near = difflib.get_close_matches(wanted, clients.names, 1)
    known = hint(wanted, near or clients.names[:MOST_NAMED])
    raise RunError(f"{where}: has no client {wanted!r}; {known}")


def plain_clients(
    clients: ClientColumns, most_cells: int, first: Sequence[str]
) -> dict[str, Any]:
    """The clients for a page; columns beyond so many cells are left out and named.

    Args:
        clients: of a run.
        most_cells: cells of the columns together.
        first: names of the columns that stay longest, then those of ``MATTER_MOST``.
    """
    order = dict.fromkeys([*first, *MATTER_MOST, *clients.columns])
    order = [name for name in order if name in clients.columns]
    gains = {
        name: column(values)
        for name, values in clients.gains.items()
        if not name.endswith("_broken")
    }
    room = max(most_cells // max(len(clients.ids), 1) - len(gains) - 1, 0)
    kept, left_out = set(order[:room]), order[room:]
    numbered = clients.names == [str(client) for client in clients.ids]
    return {
        "ids": clients.ids,
        "names": None if numbered else clients.names,
        "unseen": [int(flag) for flag in clients.unseen] if any(clients.unseen) else [],
        "status": clients.status.tolist(),
        "reference": clients.reference,
        "metric": clients.metric,
        "columns": {
            name: column(values)
            for name, values in clients.columns.items()
            if name in kept
        },
        "gains": gains,
        "left_out": left_out,
    }


def take_clients(clients: ClientColumns, places: np.ndarray) -> ClientColumns:
    """The clients at these places, in this order."""
    return clients._replace(
        ids=[clients.ids[place] for place in places],
        names=[clients.names[place] for place in places],
        unseen=clients.unseen[places],
        columns={key: of[places] for key, of in clients.columns.items()},
        gains={key: of[places] for key, of in clients.gains.items()},
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``fedblend auto`` tells of clients and columns, as sections of a page.

A section is a heading, a sentence and blocks: tables, lists, commands. Python writes
its texts; the page puts them there, and draws the intervals.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.report.page.run_values import Plain
from fedblend.report.verdict import MINUS

MOST_SHOWN, MANY = 20, 10
"""Clients of a table, and clients of which the widest intervals are cut off."""
SIDE_BY_SIDE = 6
"""Clients whose coefficients have a column each."""
MISSING = "\N{EN DASH}"
BEYOND = "nothing beyond chance"
"""Why a client differs that does not."""
Row = dict[str, str]


class AutoFiles(NamedTuple):
    """What the folder of a comparison holds."""

    path: Path
    state: Plain
    clients: list[Row]
    why: list[Row]
    effects: list[Row]
    curves: list[Row]

    @property
    def choice(self) -> Plain:
        """What the verdict chooses."""
        return self.state["findings"]["choice"]

    @property
    def first(self) -> str:
        """The method that the verdict is about."""
        return self.state["deploy"] or self.state["findings"]["better"]

    def title(self, method: str) -> str:
        """A method in words."""
        return str(self.state["methods"][method]["title"])


def section(name: str, heading: str, lead: str, *blocks: Plain) -> Plain:
    """A section of the page."""
    return {"id": name, "heading": heading, "lead": lead, "blocks": list(blocks)}


def table_block(
    heads: Sequence[str], rows: Sequence[Sequence[Any]], texts: int = 1
) -> Plain:
    """A table; its first columns are texts."""
    return {"heads": list(heads), "rows": [list(row) for row in rows], "texts": texts}


def parse_number(text: Any) -> float:
    """A cell as a number, NaN where it is empty."""
    return math.nan if text in ("", None) else float(text)


def short(value: Any, style: str = "#.4g") -> str:
    """A number as tables show it.

    >>> short("0.38316"), short(-0.5, "+.2g"), short("")
    ('0.3832', '−0.5', '–')
    """
    known = parse_number(value)
    if not math.isfinite(known):
        return MISSING
    return f"{known:{style}}".rstrip(".").replace("-", MINUS, 1)


def percent(value: Any) -> str:
    """A share of rows.

    >>> percent("0.4587")
    '45.9 %'
    """
    known = parse_number(value)
    return f"{100 * known:.1f} %" if math.isfinite(known) else MISSING


def interval_text(row: Plain, keys: Sequence[str], style: str) -> str:
    """A mean with the ends of its interval."""
    mean, low, high = (short(row.get(key), style) for key in keys)
    return f"{mean} ({low} to {high})" if MISSING not in (low, high) else mean


def draw_intervals(
    rows: Sequence[Plain], of: Callable[[Plain], list[float]]
) -> list[Any]:
    """Intervals around zero, drawn on one scale; None where one is not known."""
    ends = [of(row) for row in rows]
    known = [one for one in ends if all(map(math.isfinite, one))]
    sizes = sorted(max(map(abs, one)) for one in known) or [1.0]
    most = 1.05 * sizes[-1 if len(sizes) <= MANY else int(0.9 * len(sizes))]
    return [
        [*one, most or 1.0] if all(map(math.isfinite, one)) else None for one in ends
    ]


def interval_cells(
    rows: Sequence[Plain], keys: Sequence[str], style: str
) -> list[list[Any]]:
    """Two cells of each row: a mean with its interval, and its picture."""
    pictures = draw_intervals(
        rows, lambda row: [parse_number(row.get(key)) for key in keys]
    )
    texts = [interval_text(row, keys, style) for row in rows]
    return [list(cells) for cells in zip(texts, pictures, strict=True)]


def _some(rows: Sequence[Any], file: str) -> tuple[Sequence[Any], list[Plain]]:
    """As many rows as a table shows, and where the others are."""
    left = len(rows) - MOST_SHOWN
    more = [{"lines": [f"{left:,} more are in {file}."]}] if left > 0 else []
    return rows[:MOST_SHOWN], more


def _target_text(state: Plain) -> Callable[[Any], str]:
    return short if state["outcome"] is None else percent


CLIENT_GAIN = ("gain", "low", "high")


def clients_section(files: AutoFiles) -> Plain | None:
    """What each client has, and what it gains; those that lose most come first."""
    if not files.clients:
        return None
    state, share, target = files.state, _target_text(files.state), "Mean of the target"
    if state["outcome"] is not None:
        target = f"Rows with {state['outcome']!r}"
    lost = sorted(
        files.clients,
        key=lambda row: (row["verdict"] != "better alone", parse_number(row["gain"])),
    )
    shown, more = _some(lost, "clients.csv")
    gains = interval_cells(shown, CLIENT_GAIN, "+.2g")
    rows = [
        [
            row["client"],
            row["verdict"],
            f"{int(row['rows']):,}",
            share(row["target"]),
            percent(row["missing"]),
            short(row["alone"]),
            short(row["method"]),
            *gain,
        ]
        for row, gain in zip(shown, gains, strict=True)
    ]
    title = files.title(files.choice["candidate"])
    heads = ["Client", "Verdict", "Rows", target, "Values missing"]
    heads += ["Alone", f"With {title}", "Gain (95 %)", "loses ← → gains"]
    missing = [
        f"{row['client']}: mostly missing are {row['missing_most']}"
        for row in shown
        if row["missing_most"]
    ]
    return section(
        "clients",
        "Clients",
        f"Test {state['criterion']} of each client, mean over splits. "
        "The verdict judges all clients together (Holm's correction, 5 %), each "
        "interval one client by itself.",
        table_block(heads, rows, 2),
        *more,
        *([{"lines": missing}] if missing else []),
    )


def why_section(files: AutoFiles) -> Plain | None:
    """Why each client differs; the worst predicted ones come first."""
    if not files.why:
        return None
    clear = [row for row in files.why if row["why"] != BEYOND]
    named = clear or files.why
    shown, more = _some(
        sorted(named, key=lambda row: -parse_number(row["loss"])), "why.csv"
    )
    if others := len(files.why) - len(named):
        more = [*more, {"lines": [f"{others:,} more: {BEYOND}."]}]
    rows = [
        [
            row["client"],
            row["why"],
            short(row["loss"], "#.3g"),
            *(short(row[part], "+.2g") for part in ("columns", "level", "slopes")),
        ]
        for row in shown
    ]
    heads = ["Client", "Differs by", "Loss of the others' model", "Columns mended"]
    return section(
        "why",
        "Why clients differ",
        "The linear model of the other clients predicts a client's rows, and is then "
        "mended in steps: columns that look wrong, its own level, its own slopes. The "
        "last columns are by how much each step lowers the loss on rows that it was "
        "not fitted to; named is what is beyond chance.",
        table_block([*heads, "Own level", "Own slopes"], rows, 2),
        *more,
    )


EXPECTED = ("target", "observed_low", "observed_high")


def _off(row: Row, share: bool) -> list[float]:
    """Observed over expected less 1; of a number, observed less expected."""
    expected = parse_number(row.get("expected"))
    found = [parse_number(row.get(key)) for key in EXPECTED]
    if not share:
        return [value - expected for value in found]
    return [value / expected - 1 if expected else math.nan for value in found]


def _says(off: Sequence[float]) -> str:
    _, low, high = off
    if low <= 0 <= high:
        return "as expected"
    return "less than expected" if high < 0 else "more than expected"


def calibration_section(files: AutoFiles) -> Plain | None:
    """What was observed and expected of each client; those that are off come first."""
    clients = [row for row in files.clients if row.get("expected")]
    if not clients:
        return None
    share, text = files.state["outcome"] is not None, _target_text(files.state)

    def is_off(row: Row) -> bool:
        return _says(_off(row, share)) != "as expected"

    ordered = sorted(clients, key=lambda row: (not is_off(row), -int(row["rows"])))
    shown, more = _some(ordered, "clients.csv")
    pictures = draw_intervals(shown, lambda row: _off(row, share))
    rows = []
    for row, picture in zip(shown, pictures, strict=True):
        off = _off(row, share)
        ends: Plain = dict(
            zip(EXPECTED, [int(share) + value for value in off], strict=True)
        )
        shown_text = interval_text(ends, EXPECTED, ".2f" if share else "+.2g")
        cells = [row["client"], _says(off), text(row["target"]), text(row["expected"])]
        rows.append([*cells, shown_text, picture])
    what = "Observed / expected" if share else "Observed less expected"
    return section(
        "calibration",
        "Calibration",
        f"Rows predicted by {files.title(files.choice['method'])}, which was fitted to "
        "the other four fifths of all rows. Off by more than their interval: "
        f"{sum(map(is_off, clients)):,} of {len(clients):,}; by chance alone, one of "
        "20.",
        table_block(
            ["Client", "Is", "Observed", "Expected", f"{what} (95 %)", "less ← → more"],
            rows,
            2,
        ),
        *more,
    )


EFFECT = ("effect", "low", "high")


def effects_section(files: AutoFiles) -> Plain | None:
    """The coefficients, shared and own."""
    if not files.effects:
        return None
    ratio = files.state["effect"] != "change of the target"
    style = "#.3g" if ratio else "+.2g"
    neutral = 1.0 if ratio else 0.0

    def ends(row: Plain) -> list[float]:
        found = [parse_number(row[key]) for key in EFFECT]
        if not ratio:
            return found
        return [math.log(value) if value > 0 else math.nan for value in found]

    def lines(rows: Sequence[Row], key: str) -> list[list[Any]]:
        return [
            [row[key], interval_text(row, EFFECT, style), picture]
            for row, picture in zip(rows, draw_intervals(rows, ends), strict=True)
        ]

    def is_vague(row: Row) -> bool:
        return parse_number(row["low"]) <= neutral <= parse_number(row["high"])

    shared = [row for row in files.effects if not row["client"]]
    own = [row for row in files.effects if row["client"]]
    name, blocks = f"{files.state['effect']} (95 %)", []
    if shared:
        slopes = [row for row in shared if row["input"] != "level"]
        some, more = _some(sorted(slopes, key=is_vague), "effects.csv")
        heads = ["Input", name, "lowers ← → raises"]
        blocks += [table_block(heads, lines(some, "input")), *more]
        levels = [row for row in own if row["input"] == "level"]
        some, more = _some(
            sorted(levels, key=lambda row: -abs(ends(row)[0])), "effects.csv"
        )
        if some:
            heads = ["Own level of", name, "lower ← → higher"]
            blocks += [table_block(heads, lines(some, "client")), *more]
        clear = [row for row in own if row["input"] != "level" and not is_vague(row)]
        if clear:
            said = [
                f"{row['client']}: {row['input']}, beyond the shared one "
                f"{interval_text(row, EFFECT, style)}"
                for row in clear[:MOST_SHOWN]
            ]
            blocks.append({"lines": said})
    else:
        names = list(dict.fromkeys(row["client"] for row in own))[:SIDE_BY_SIDE]
        cells = {
            (row["client"], row["input"]): interval_text(row, EFFECT, style)
            for row in own
        }
        slopes = [row for row in own if row["input"] != "level"]
        inputs = dict.fromkeys(row["input"] for row in sorted(slopes, key=is_vague))
        some, more = _some([*inputs], "effects.csv")
        rows = [[of, *(cells.get((who, of), MISSING) for who in names)] for of in some]
        blocks += [table_block(["Input", *names], rows), *more]
        if len(names) < len({row["client"] for row in own}):
            blocks.append({"lines": ["Those of all clients are in effects.csv."]})
    return section(
        "effects",
        "Effects",
        f"Coefficients of {files.title(files.choice['method'])} on all rows, as "
        f"{name}, of inputs together. They are shrunk as the method shrinks them, "
        "and say what predicts, not what causes.",
        *blocks,
    )


def ranks_section(files: AutoFiles) -> Plain | None:
    """C-index and integrated Brier score of models of times until an event."""
    known = [of for of in files.state["methods"].values() if "intervals" in of]
    if not known:
        return None

    def text(ends: Sequence[Any]) -> str:
        return interval_text(dict(zip(EFFECT, ends, strict=True)), EFFECT, ".3f")

    rows = [
        [of["title"], *(text(of["intervals"][key]) for key in ("c_index", "brier"))]
        for of in known
    ]
    rows_held, events = files.state["held"]
    return section(
        "ranks",
        "Ranks and probabilities",
        "C-index: how often the row with the earlier event has the higher risk; more "
        "is better, 0.5 is chance. Integrated Brier score: the squared error of "
        "survival over time; less is better. Means over clients, intervals over "
        f"splits: a split tests {rows_held:,} rows, of which {events:,} have their "
        "event: these are what the intervals rest on. Whether "
        "a method is better than training alone is judged by pairs, above.",
        table_block(["Method", "C-index (95 %)", "Brier (95 %)"], rows),
    )


def curves_section(files: AutoFiles) -> Plain | None:
    """What each client saw and what its model predicts, over time."""
    if not files.curves:
        return None
    by_client: dict[str, list[Row]] = {}
    for row in files.curves:
        by_client.setdefault(row["client"], []).append(row)
    large = sorted(files.clients, key=lambda row: -int(row["rows"]))
    shown, more = _some([row["client"] for row in large], "curves.csv")
    titles = {"kaplan_meier": "Kaplan-Meier", "predicted": "mean prediction"}
    figures = [
        {
            "title": name,
            "lines": [
                {
                    "label": label,
                    "x": [float(row["time"]) for row in by_client[name]],
                    "y": [float(row[key]) for row in by_client[name]],
                }
                for key, label in titles.items()
            ],
        }
        for name in shown
    ]
    return section(
        "curves",
        "Survival",
        "Rows without the event over time, as seen (Kaplan-Meier) and as predicted by "
        f"{files.title(files.first)}, mean over the same rows, which it was trained "
        "on. Each client has a baseline of its own, so only the shape can be missed.",
        {"figures": figures, "xLabel": f"{files.state['request']['target']}"},
        *more,
    )


def columns_section(files: AutoFiles) -> Plain | None:
    """What was done to every column."""
    columns = files.state["seen"]["columns"]
    if not columns:
        return None
    rows = [[one[key] for key in ("column", "kind", "seen", "done")] for one in columns]
    heads = ["Column", "Kind", "Seen", "Done"]
    return section(
        "columns",
        "Columns",
        "What was done to every column: fitted on training rows only, and part of "
        "every model.",
        table_block(heads, rows, 99),
    )

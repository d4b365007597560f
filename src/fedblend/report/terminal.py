# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: a table of its models, its costs, and a small plot."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedblend.report import braille
from fedblend.report.alone import in_full
from fedblend.report.sentences import in_words, tally_from
from fedblend.report.series import MODELS, Row, curves, shown_metrics, shown_splits

COLORS = {"shared": "blue", "local": "yellow", "personal": "green"}
COLUMNS = {
    "mean": "mean",
    "weighted": "weighted",
    "std": "spread",
    "worst_tenth": "worst tenth",
    "worst": "worst",
}
PLOT_WIDTH = 64


def show(
    rows: Sequence[Row], summary: Any, console: Console, over_seeds: Any = None
) -> None:
    """Print a run.

    Args:
        rows: ``Record.row()`` of each block, with "seed" where there are several.
        summary: ``Run.summary()``, one or a list over seeds; numbers of several
            seeds are averaged.
        console: where to print.
        over_seeds: harmed clients by all seeds together, "harmed" and "unseen"; those
            of the summary itself where there is only one.
    """
    summaries = summary if isinstance(summary, list) else [summary]
    for split in shown_splits(rows):
        console.print(_table(summaries, split))
    unseen = [one["unseen"] for one in summaries if "unseen" in one]
    for split in shown_splits(unseen[:1]):
        number = unseen[0]["clients"]
        plural = "" if number == 1 else "s"
        console.print(_table(unseen, split, f" of {number} unseen client{plural}"))
    together = over_seeds or {}
    lines = _alone_lines(summaries) + _harm_lines(summaries, together)
    lines += _harm_lines(unseen, together.get("unseen") or {}, "unseen ")
    lines += _central_lines(summaries)
    for line in lines + _cost_lines(summaries):
        console.print(line, highlight=False)
    splits = shown_splits(rows)
    if splits and len({row["round"] for row in rows}) > 1:
        _plot(rows, splits[0], console)


def _alone_lines(summaries: Sequence[dict]) -> list[str]:
    """How long the clients trained alone whose numbers are in the table."""
    alone = summaries[0].get("alone")
    return [f"local, training alone: {in_full(alone)}"] if alone else []


def _central_lines(summaries: Sequence[dict]) -> list[str]:
    """The shared model on the server's own rows, mean over seeds."""
    central = summaries[0].get("central", {})
    split = "test" if "test" in central else "train"
    names = [name for name in central.get(split, {}) if name != "rows"]
    if not names:
        return []
    said = [
        f"{name} {_values(summaries, 'central', split, name).mean():.4f}"
        for name in names
    ]
    rows = central[split]["rows"]
    return [f"the server's {rows} {split} rows: shared model {', '.join(said)}"]


def human_bits(bits: float) -> str:
    """Bits with a unit.

    >>> human_bits(1248000), human_bits(12)
    ('1.25 Mbit', '12 bit')
    """
    for unit in ("bit", "kbit", "Mbit", "Gbit"):
        if bits < 999.5:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Tbit"


def _values(summaries: Sequence[dict], *path: str) -> np.ndarray:
    """A number of every seed's summary; NaN where it is missing."""
    values = []
    for summary in summaries:
        value: Any = summary
        for name in path:
            value = value.get(name, {})
        values.append(float("nan") if value in ({}, None) else float(value))
    return np.array(values)


def _mean(summaries: Sequence[dict], *path: str) -> float:
    return float(_values(summaries, *path).mean())


def _table(summaries: Sequence[dict], split: str, whose: str = "") -> Table:
    """The models of a split, a line for each metric of each."""
    last = summaries[0]
    seeds = f", mean of {len(summaries)} seeds" if len(summaries) > 1 else ""
    table = Table(
        title=f"{split} rows{whose} after round {last['round']}{seeds}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("metric")
    table.add_column("model")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    models = last["measures"][split]
    for metric in shown_metrics([last], split):
        for model in (name for name in MODELS if name in models):
            path = ("measures", split, model, metric)
            values = [_mean(summaries, *path, field) for field in COLUMNS]
            cells = [f"{value:.4f}" for value in values]
            table.add_row(metric, Text(model, COLORS[model]), *cells)
        table.add_section()
    return table


def _harm_lines(
    summaries: Sequence[dict], together: dict, whose: str = ""
) -> list[str]:
    """Whom the personal model serves worse, by the main metric of each split."""
    lines = []
    only = summaries[0] if len(summaries) == 1 else {}
    harmed = together.get("harmed") or only.get("harmed") or {}
    for split in shown_splits(summaries):
        metric = shown_metrics(summaries, split)[0]
        for name, found in harmed.get(split, {}).get(metric, {}).items():
            counted = tally_from(found)
            if counted is not None:
                said = in_words(counted, name.removeprefix("than_"), whose)
                lines.append(f"harmed ({split} {metric}): {said}")
    return lines


def _cost_lines(summaries: Sequence[dict]) -> list[str]:
    """What travelled, who was not heard, and how long it took."""
    lines = []
    if "bits" in summaries[0]:
        parts = []
        for way in ("up", "down"):
            total = _mean(summaries, "bits", way)
            each = _mean(summaries, "bits", f"{way}_per_client", "mean")
            parts.append(f"{way} {human_bits(total)} ({human_bits(each)} a client)")
        lines.append("sent: " + ", ".join(parts))
    lost = {name: _mean(summaries, name) for name in ("dropped", "rejected")}
    if any(number > 0 for number in lost.values()):
        lines.append(", ".join(f"{name}: {number:g}" for name, number in lost.items()))
    if "compile_seconds" in summaries[0]:
        seconds, compiling = (
            _mean(summaries, name) for name in ("seconds", "compile_seconds")
        )
        before = _mean(summaries, "alone", "seconds")
        alone = "" if np.isnan(before) else f", training alone {before:.2f} s"
        lines.append(
            f"time: rounds {seconds:.2f} s, compiling {compiling:.2f} s{alone}"
        )
    return lines


def _plot(rows: Sequence[Row], split: str, console: Console) -> None:
    metric = shown_metrics(rows, split)[0]
    found = curves(rows, split, metric)
    series = {model: (curve.rounds, curve.mean) for model, curve in found.items()}
    title = Text(f"{split} {metric}, mean over clients, by rounds:")
    for model in series:
        title.append(f" {model}", style=COLORS[model])
    utf = console.encoding.lower().startswith("utf")
    width = max(min(PLOT_WIDTH, console.width - 12), 10)
    console.print(title)
    console.print(braille.plot(series, COLORS, width, braille=utf))

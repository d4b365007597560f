# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: a table of its models, its costs, and a small plot."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedblend.report import measures
from fedblend.report.measures import Row

COLORS = {"shared": "blue", "local": "yellow", "personal": "green"}
COLUMNS = {
    "mean": "mean",
    "weighted": "weighted",
    "std": "spread",
    "worst_tenth": "worst tenth",
    "worst": "worst",
}
PLOT_WIDTH = 64
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a braille character, by column and row."""

Series = tuple[ArrayLike, ArrayLike]
"""The x values and the y values of a line."""


def show(
    rows: Sequence[Row], summary: Any, console: Console, over_seeds: Any = None
) -> None:
    """Print a run.

    Args:
        rows: ``Record.row()`` of each block, with "seed" where there are several.
        summary: ``Run.summary()``, one or a list over seeds; numbers of several
            seeds are averaged.
        console: where to print.
        over_seeds: what holds for all seeds together, as in ``summary.json``: the
            harmed clients, "harmed" and "unseen", and "privacy".
    """
    summaries = summary if isinstance(summary, list) else [summary]
    splits = measures.main_splits(rows)
    for split in splits:
        console.print(_table(summaries, split))
    unseen = [one["unseen"] for one in summaries if "unseen" in one]
    for split in measures.main_splits(unseen[:1]):
        number = unseen[0]["clients"]
        plural = "" if number == 1 else "s"
        console.print(_table(unseen, split, f" of {number} unseen client{plural}"))
    together, alone = over_seeds or {}, summaries[0].get("alone")
    lines = []
    if alone:
        lines.append(f"local, training alone: {measures.training_alone(alone)}")
    lines += _harm_lines(summaries, together)
    lines += _harm_lines(unseen, together.get("unseen") or {}, "unseen ")
    lines += _server_lines(summaries) + _certificate_lines(summaries)
    for line in lines + _cost_lines(summaries):
        console.print(line, highlight=False)
    if splits and len({row["round"] for row in rows}) > 1:
        _plot_main_metric(rows, splits[0], console)
    if "privacy" in together:
        promise = together["privacy"]["sentence"]
        console.print(f"privacy: {promise}", markup=False, soft_wrap=True)


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


def _mean(summaries: Sequence[dict], *path: str) -> float:
    """A number, mean over the seeds; NaN where a seed has none."""
    return float(np.mean([measures.value_at(summary, *path) for summary in summaries]))


def _table(summaries: Sequence[dict], split: str, kind: str = "") -> Table:
    """The models of a split, a line for each metric of each."""
    last = summaries[0]
    seeds = f", mean of {len(summaries)} seeds" if len(summaries) > 1 else ""
    table = Table(
        title=f"{split} rows{kind} after round {last['round']}{seeds}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("metric", no_wrap=True)
    table.add_column("model")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    models = last["measures"][split]
    for metric in measures.list_metrics([last], split):
        for model in (name for name in measures.MODELS if name in models):
            path = ("measures", split, model, metric)
            cells = [f"{_mean(summaries, *path, field):.4f}" for field in COLUMNS]
            table.add_row(metric, Text(model, COLORS[model]), *cells)
        table.add_section()
    return table


def _harm_lines(summaries: Sequence[dict], together: dict, kind: str = "") -> list[str]:
    """How many clients each split's main metric calls harmed."""
    lines = []
    only = summaries[0] if len(summaries) == 1 else {}
    harmed = together.get("harmed") or only.get("harmed") or {}
    for split in measures.main_splits(summaries):
        metric = measures.list_metrics(summaries, split)[0]
        for name, found in harmed.get(split, {}).get(metric, {}).items():
            counted = measures.summary_from(found)
            if counted is not None:
                text = measures.harm_sentence(counted, name.removeprefix("than_"), kind)
                lines.append(f"harmed ({split} {metric}): {text}")
    return lines


def _server_lines(summaries: Sequence[dict]) -> list[str]:
    """The shared model on the server's own rows, where it has some."""
    central = summaries[0].get("central", {})
    split = "test" if "test" in central else "train"
    names = [name for name in central.get(split, {}) if name != "rows"]
    if not names:
        return []
    values = [
        f"{name} {_mean(summaries, 'central', split, name):.4f}" for name in names
    ]
    rows = central[split]["rows"]
    return [f"the server's {rows} {split} rows: shared model {', '.join(values)}"]


def _certificate_lines(summaries: Sequence[dict]) -> list[str]:
    """What is proven of the objective, for the worst of the seeds."""
    found = [one["certificate"] for one in summaries if "certificate" in one]
    if not found:
        return []
    worst = max(found, key=lambda one: one["gap"])
    which = ", the worst seed" if len(found) > 1 else ""
    return [
        f"certificate: f~ - min f~ <= {worst['gap']:.3g} (f~ = "
        f"{worst['objective']:.6g}, |grad f~| = {worst['gradient_norm']:.3g}{which})"
    ]


def _cost_lines(summaries: Sequence[dict]) -> list[str]:
    """Bits sent, updates that did not count, and seconds."""
    lines = []
    if "bits" in summaries[0]:
        parts = []
        for link in ("up", "down"):
            total = _mean(summaries, "bits", link)
            each = _mean(summaries, "bits", f"{link}_per_client", "mean")
            parts.append(f"{link} {human_bits(total)} ({human_bits(each)} a client)")
        lines.append("sent: " + ", ".join(parts))
    lost = {name: _mean(summaries, name) for name in ("dropped", "rejected")}
    if any(number > 0 for number in lost.values()):
        lines.append(", ".join(f"{name}: {number:g}" for name, number in lost.items()))
    if "compile_seconds" in summaries[0]:
        seconds = _mean(summaries, "seconds")
        parts = {
            "compiling": _mean(summaries, "compile_seconds"),
            "measuring": _mean(summaries, "measure_seconds"),
            "training alone": _mean(summaries, "alone", "seconds"),
        }
        others = [f", {name} {s:.2f} s" for name, s in parts.items() if not np.isnan(s)]
        lines.append(f"time: rounds {seconds:.2f} s{''.join(others)}")
    return lines


def _plot_main_metric(rows: Sequence[Row], split: str, console: Console) -> None:
    metric = measures.list_metrics(rows, split)[0]
    found = measures.curves(rows, split, metric)
    series = {model: (curve.rounds, curve.mean) for model, curve in found.items()}
    title = Text(f"{split} {metric}, mean over clients, by rounds:")
    for model in series:
        title.append(f" {model}", style=COLORS[model])
    utf = console.encoding.lower().startswith("utf")
    width = max(min(PLOT_WIDTH, console.width - 12), 10)
    console.print(title)
    console.print(plot(series, COLORS, width, braille=utf))


def plot(
    series: Mapping[str, Series],
    colors: Mapping[str, str],
    width: int = 60,
    height: int = 10,
    braille: bool = True,
) -> Text:
    """Lines through the points of each series, with the ranges of both axes.

    Args:
        series: by name.
        colors: of each name; where lines meet, the last one's.
        width: of the plot, in characters; names and numbers stand around it.
        height: of the plot, in lines.
        braille: draw braille characters of two by four dots; else a star each.
    """
    points = [np.asarray(values, float) for values in series.values()]
    across = np.concatenate([values[0] for values in points])
    up = np.concatenate([values[1] for values in points])
    up = up[np.isfinite(up)]
    if not up.size:
        return Text("nothing to plot")
    left, right, low, high = across.min(), across.max(), up.min(), up.max()
    cells, ink = np.zeros((height, width), int), np.full((height, width), "", object)
    for name, (x, y) in zip(series, points, strict=True):
        fine = np.linspace(left, right, 8 * width)
        fine = fine[(fine >= x.min()) & (fine <= x.max())]
        level = np.interp(fine, x, y)
        fine, level = fine[np.isfinite(level)], level[np.isfinite(level)]
        column = np.rint((fine - left) / ((right - left) or 1) * (2 * width - 1))
        row = np.rint((high - level) / ((high - low) or 1) * (4 * height - 1))
        for dot_x, dot_y in zip(column.astype(int), row.astype(int), strict=True):
            cell = (dot_y // 4, dot_x // 2)
            cells[cell] |= DOTS[dot_x % 2][dot_y % 4]
            ink[cell] = colors[name]
    text = Text()
    for line in range(height):
        edge = {0: high, height - 1: low}.get(line)
        text.append(f"{'' if edge is None else format(edge, '.4g'):>9} ┤")
        for bits, color in zip(cells[line], ink[line], strict=True):
            glyph = chr(0x2800 + bits) if braille else " *"[int(bits > 0)]
            text.append(glyph, style=color or None)
        text.append("\n")
    ends = f"{left:.4g}", f"{right:.4g}"
    return text.append(f"{'':11}{ends[0]}{ends[1]:>{width - len(ends[0])}}")

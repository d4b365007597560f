# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of runs: curves over rounds and bits, gains of clients.

matplotlib is imported when a figure is drawn, and only its object-oriented part: no
window, no global state. Figures fit a paper: text has 7 points or more, and PDFs embed
their fonts. Lines differ in color, marker and dashes, so that they are told apart in
gray print and with any color vision; colors are Okabe and Ito's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.metrics.registry import entry
from fedblend.report import measures
from fedblend.report.measures import Curve, ModelScores, Row
from fedblend.simulation.result import Results
from fedblend.stats.gains import Evidence, Gain, gain_summary

COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
MARKERS = "os^DvPX*"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (7, 2)))
SHARED, HARM, HELP, ALONE, UNSURE = *COLORS[:3], COLORS[4], "#B0B0B0"
LOOKS: Any = {
    "shared": {"color": SHARED, "ls": "-", "marker": "o"},
    "local": {"color": ALONE, "ls": (0, (5, 2))},
    "personal": {"color": HELP, "ls": (0, (4, 1, 1, 1)), "marker": "^"},
}
LABELS = {
    "shared": "the shared model",
    "local": "training alone",
    "personal": "the personal model",
}
STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "svg.hashsalt": "fedblend",
    "pdf.fonttype": 42,  # text that journals accept and readers can copy
    "savefig.dpi": 150,
}
FORMATS = ("png", "svg", "pdf")
USUAL = ("png", "svg")
"""The formats of figures if none are asked for; PDF takes as long as both."""
ACROSS = {"rounds": "rounds of communication", "bits": "bits sent, both ways"}
MARKED = 8
"""Markers on a line, about."""
MOST_COLUMNS = 6
"""Of a legend."""
MOST_NAMES, LONGEST_NAME = 30, 18
"""Clients whose names fit under bars, and characters of a name."""

Alone = dict[str, Any] | None
"""``Run.alone``: how long the clients trained alone that a run is compared with."""
Lines = Mapping[str, tuple[Curve, Any]]
"""Curves with their looks, by label."""


def looks() -> Iterator[dict[str, Any]]:
    """The color, marker and dashes of each line; 280 differ in one of them."""
    for color, marker, dashes in zip(cycle(COLORS), cycle(MARKERS), cycle(DASHES)):
        yield {"color": color, "marker": marker, "ls": dashes}


def plot_run(run: Results, path: Any = None, over: PyTree | None = None) -> Any:
    """Curves of a run and its clients' gains, as a matplotlib figure.

    The range over seeds is a band; a sweep ``over`` a tree of arrays has a line for
    each value. The figure is saved to ``path`` if given, in the format of its suffix.
    """
    rows = measures.rows_of(run)
    with style():
        splits = measures.main_splits(rows)
        if not splits:
            figure = new_figure(4.8, 3.2)
            figure.suptitle("Nothing was measured in this run")
        elif over is not None:
            figure = _sweep_figure(over, rows, splits[0])
        else:
            metric = measures.list_metrics(rows, splits[0])[0]
            gains = measures.compare_models(run.evidence, splits[0], metric)
            names = [run.federated_data.name(int(one)) for one in run.measured_ids]
            figure = curves_figure(rows, splits[0], run.alone, gains, names)
        if path is not None:
            figure.savefig(path)
    return figure


def plot_rows(
    rows: list[Row],
    folder: Path,
    evidence: Evidence | None = None,
    alone: Alone = None,
    names: Sequence[str] = (),
    formats: Sequence[str] = USUAL,
) -> list[Path]:
    """Write the figures of a run's rows, each in all formats; the files written.

    Args:
        rows: see ``measures.rows_of``.
        folder: the folder of the figures; made if it is missing.
        evidence: ``Run.evidence``, for the figure of the clients' gains.
        alone: ``Run.alone``.
        names: of the measured clients.
        formats: of ``FORMATS``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with style():
        for split in measures.main_splits(rows):
            figure = curves_figure(rows, split, alone)
            written += save(figure, folder / f"curves_{split}", formats)
            metric = measures.list_metrics(rows, split)[0]
            if evidence and (gains := measures.compare_models(evidence, split, metric)):
                figure = new_figure(6.4, 3.6)
                draw_gains(figure.subplots(), gains, alone, names)
                written += save(figure, folder / f"gains_{split}", formats)
    return written


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, inside."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, stem: Path, formats: Sequence[str] = USUAL) -> list[Path]:
    """Write a figure in all formats, the same bytes every time; the files written."""
    written = [stem.with_suffix(f".{one}") for one in formats]
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    for path in written:
        figure.savefig(path, metadata=dates.get(path.suffix))
        figure.set_layout_engine("none")  # it is laid out once, for all formats
    return written


def curves_figure(
    rows: list[Row],
    split: str,
    alone: Alone,
    gains: ModelScores | None = None,
    names: Sequence[str] = (),
) -> Any:
    """Metrics by rounds and by bits, a line for each model; gains below."""
    lines = {}
    for metric in measures.curve_metrics(rows, split):
        found = measures.curves(rows, split, metric)
        labels = {model: _label(model, alone) for model in LABELS}
        if {"shared", "personal"} <= set(found) and np.array_equal(
            found["shared"].mean, found["personal"].mean, equal_nan=True
        ):
            del found["personal"]
            labels["shared"] += ", which is also the personal one"
        lines[metric] = {
            labels[model]: (curve, LOOKS[model]) for model, curve in found.items()
        }
    seeds = len({row.get("seed") for row in rows})
    note = f"; bands: lowest to highest of {seeds} seeds" if seeds > 1 else ""
    title = f"Mean over clients, {split} rows{note}"
    figure, grid = _panels(lines, split, title, below=gains is not None)
    if gains is not None:
        draw_gains(figure.add_subplot(grid[len(lines), :]), gains, alone, names)
    return figure


def draw_gains(
    axes: Any, found: ModelScores, alone: Alone, names: Sequence[str] = ()
) -> None:
    """A bar with its interval for each client, colored where it excludes zero."""
    gain = found.gain
    order = np.argsort(gain.value, kind="stable")
    order = order[~np.isnan(gain.value[order])]
    across = np.arange(len(order))
    axes.bar(across, gain.value[order], width=0.9, color=_colors(gain)[order])
    _draw_intervals(axes, across, gain, order)
    axes.grid(axis="x", visible=False)
    title = measures.harm_title(gain_summary(gain), found.reference)
    if found.seeds > 1:
        title += f"; mean of {found.seeds} seeds"
    axes.set_title(title)
    other = _label(found.reference, alone)
    axes.set_ylabel(f"{found.split} {found.metric},\ngain over {other}")
    fits = bool(names) and len(order) <= MOST_NAMES
    shown = [_shorten(names[int(place)]) for place in order] if fits else []
    axes.set_xticks(across[: len(shown)], shown, rotation=45, ha="right")
    who = "clients" if fits else f"{len(order)} clients, named in clients.csv"
    axes.set_xlabel(f"{who}, sorted by gain\nlines: 95 % intervals; gray: either way")


def _shorten(name: str) -> str:
    """A name that fits under a bar."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _label(model: str, alone: Alone) -> str:
    """The name of a model; of training alone with its rounds."""
    rounds = measures.rounds_alone(alone) if model == "local" else ""
    return LABELS[model] + (f" ({rounds})" if rounds else "")


def _colors(gain: Gain) -> np.ndarray:
    """The color of each client: harmed, helped, or neither for sure."""
    return np.where(gain.harmed, HARM, np.where(gain.helped, HELP, UNSURE))


def _draw_intervals(
    axes: Any, across: np.ndarray, gain: Gain, order: np.ndarray
) -> None:
    """The line of no gain, and a thin line over each interval that has two ends."""
    low, high = gain.low[order], gain.high[order]
    ends = np.isfinite(low) & np.isfinite(high)
    axes.vlines(across[ends], low[ends], high[ends], color="#606060", linewidth=0.7)
    axes.axhline(0, color="#404040", linewidth=0.8)


def _sweep_figure(over: PyTree, rows: list[Row], split: str) -> Any:
    """The personal model for each value of a sweep."""
    leaves = jax.tree.leaves(over)
    values = enumerate(zip(*leaves, strict=True))
    names = {at: ", ".join(f"{float(one):.3g}" for one in of) for at, of in values}
    lines = {
        metric: {
            names[at]: (measures.curves(own, split, metric)["personal"], look)
            for at, look in zip(names, looks(), strict=False)
            for own in [[row for row in rows if row["seed"] == at]]
        }
        for metric in measures.curve_metrics(rows, split)
    }
    title = f"Personal model, mean over clients, {split} rows, by value of the sweep"
    return _panels(lines, split, title)[0]


def _panels(
    lines: Mapping[str, Lines],
    split: str,
    title: str,
    below: bool = False,
) -> tuple[Any, Any]:
    """A figure with a row for each metric and a column for rounds and bits.

    Returns:
        The figure and its grid, with an empty row at the end if ``below``.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    drawn = [curve for by_name in lines.values() for curve, _ in by_name.values()]
    columns = list(ACROSS) if any(one.bits.any() for one in drawn) else ["rounds"]
    height = len(lines)
    width = 7.8 if len(columns) == 2 else 4.2
    figure = new_figure(width, 2.4 * (height + below) + 0.3)
    grid = figure.add_gridspec(height + below, len(columns))
    for place, (metric, by_name) in enumerate(lines.items()):
        for column, over in enumerate(columns):
            axes = figure.add_subplot(grid[place, column])
            for number, (name, (curve, look)) in enumerate(by_name.items()):
                _draw_curve(axes, curve, over, number, label=name, **look)
            _bound(axes, metric)
            axes.set_ylabel(f"{split} {metric}" if column == 0 else "")
            axes.set_xlabel(ACROSS[over] if place == height - 1 else "")
            if over == "bits":
                axes.xaxis.set_major_formatter(EngFormatter(unit="bit"))
                axes.xaxis.set_major_locator(MaxNLocator(4))
    figure.axes[0].set_title(title, color="#404040")
    _add_legend(figure)
    return figure, grid


def _draw_curve(axes: Any, curve: Curve, over: str, number: int, **look: Any) -> None:
    """A line over "rounds" or "bits", with a band where seeds differ."""
    across = curve.rounds if over == "rounds" else curve.bits
    step = max(len(across) // MARKED, 1)
    # Markers of lines that lie on each other alternate.
    axes.plot(across, curve.mean, markevery=(number % step, step), **look)
    if (curve.high > curve.low).any():
        band = {"color": look["color"], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(across, curve.low, curve.high, **band)


def _bound(axes: Any, metric: str) -> None:
    """No axis beyond 0 and 1 for a metric that lies between them."""
    known = entry(metric)
    if known is not None and known.facts.bounded:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0.0), min(high, 1.0))


def _add_legend(figure: Any) -> None:
    """The legend above the axes, with as many columns as fit into the figure."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for columns in range(min(len(labels), MOST_COLUMNS), 0, -1):
        legend = figure.legend(handles, labels, loc="outside upper left", ncols=columns)
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            return
        legend.remove()

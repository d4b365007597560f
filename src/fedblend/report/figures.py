# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of runs: curves over rounds and bits, and each client's gain.

matplotlib is imported when a figure is drawn, and only its object-oriented part:
no window, no global state.

How models and methods look in figures: colors, dashes, markers and names.

Colors are Okabe and Ito's, which readers with any color vision can tell apart.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.core import PyTree
from fedblend.metrics.registry import entry
from fedblend.report import measures
from fedblend.report.measures import Clients, Curve, ModelScores, Row
from fedblend.simulation.result import Results
from fedblend.stats.gains import Evidence, Gain, gain_summary

COLORS = {"shared": "#0072B2", "local": "#E69F00", "personal": "#009E73"}
HARM, UNSURE = "#D55E00", "#B0B0B0"
LOOKS: Any = {
    "shared": {"color": COLORS["shared"], "ls": "-", "marker": "o"},
    "local": {"color": COLORS["local"], "ls": (0, (5, 2))},
    "personal": {"color": COLORS["personal"], "ls": (0, (4, 1, 1, 1)), "marker": "^"},
}
"""Models differ in dashes and markers too, for readers and printers without colors."""
MARKERS, DASHES = "osD^vX", ("-", (0, (5, 2)), (0, (4, 1, 1, 1)), (0, (1, 1)))
"""Those of the values of a sweep."""
LABELS = {
    "shared": "the shared model",
    "local": "training alone",
    "personal": "the personal model",
}

Alone = dict[str, Any] | None
"""``Run.alone``: how long the clients trained alone that a run is compared with."""


def label(model: str, alone: Alone) -> str:
    """The name of a model; of training alone with its rounds."""
    rounds = measures.rounds_alone(alone) if model == "local" else ""
    return LABELS[model] + (f" ({rounds})" if rounds else "")


MOST_NAMES, LONGEST_NAME = 30, 18
"""Clients whose names fit under bars, and characters of a name."""


def draw_gains(
    axes: Any,
    found: ModelScores,
    alone: Alone,
    names: Sequence[str] = (),
) -> None:
    """A bar with its interval for each client, colored where it excludes zero."""
    gain = found.gain
    order = np.argsort(gain.value, kind="stable")
    order = order[~np.isnan(gain.value[order])]
    across = np.arange(len(order))
    axes.bar(across, gain.value[order], width=0.9, color=_colors(gain)[order])
    _draw_intervals(axes, across, gain, order)
    axes.grid(axis="x", visible=False)
    title = measures.in_short(gain_summary(gain), found.reference)
    if found.seeds > 1:
        title += f"; mean of {found.seeds} seeds"
    axes.set_title(title)
    other = label(found.reference, alone)
    axes.set_ylabel(f"{found.split} {found.metric},\ngain over {other}")
    fits = bool(names) and len(order) <= MOST_NAMES
    shown = [_shortened(names[int(place)]) for place in order] if fits else []
    axes.set_xticks(across[: len(shown)], shown, rotation=45, ha="right", fontsize=7)
    who = "clients" if fits else f"{len(order)} clients, named in clients.csv"
    axes.set_xlabel(
        f"{who}, sorted by gain\nlines: 95 % intervals; gray: either way", fontsize=8
    )


def _shortened(name: str) -> str:
    """A name that fits under a bar."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def draw_gains_by_rows(
    axes: Any, found: ModelScores, clients: Clients, alone: Alone
) -> None:
    """The gains against the clients' training rows."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    gain = found.gain
    known = np.flatnonzero(np.isfinite(gain.value))
    across = np.asarray(clients.train, float)[known]
    axes.scatter(across, gain.value[known], c=_colors(gain)[known], s=14, zorder=3)
    _draw_intervals(axes, across, gain, known)
    axes.set_xlabel("training rows of the client")
    axes.set_ylabel(f"gain over {label(found.reference, alone)}")
    if known.size:  # an empty axis has no logarithm
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def _colors(gain: Gain) -> np.ndarray:
    """The color of each client: harmed, helped, or neither for sure."""
    sure = np.where(gain.helped, COLORS["personal"], UNSURE)
    return np.where(gain.harmed, HARM, sure)


def _draw_intervals(
    axes: Any, across: np.ndarray, gain: Gain, order: np.ndarray
) -> None:
    """The line of no gain, and a thin line over each interval that has two ends."""
    low, high = gain.low[order], gain.high[order]
    ends = np.isfinite(low) & np.isfinite(high)
    axes.vlines(across[ends], low[ends], high[ends], color="#606060", linewidth=0.7)
    axes.axhline(0, color="#404040", linewidth=0.8)


MARKED = 8
"""Markers on a line, about."""
FORMATS = ("png", "svg", "pdf")
USUAL = ("png", "svg")
"""The formats of figures if none are asked for; PDF takes as long as both."""
ACROSS = {
    "rounds": "rounds of communication",
    "bits": "bits sent, both ways, all clients",
}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "fedblend",
    "pdf.fonttype": 42,  # text that journals accept and readers can copy
    "savefig.dpi": 150,
}


def plot_run(run: Results, path: Any = None, over: PyTree | None = None) -> Any:
    """Curves of a run and its clients' gains, as a matplotlib figure.

    The range over seeds is a band; a sweep ``over`` a tree of arrays has a line for
    each value. The figure is saved to ``path`` if given, in the format of its suffix.
    """
    rows = measures.rows_of(run)
    with style():
        splits = measures.shown_splits(rows)
        if not splits:
            figure = new_figure(4.8, 3.2)
            figure.suptitle("Nothing was measured in this run")
        elif over is not None:
            figure = _sweep_figure(over, rows, splits[0])
        else:
            metric = measures.shown_metrics(rows, splits[0])[0]
            gains = measures.compared(run.evidence, splits[0], metric)
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
        names: of the measured clients, where they are known.
        formats: of ``FORMATS``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with style():
        for split in measures.shown_splits(rows):
            figure = curves_figure(rows, split, alone)
            written += save(figure, folder / f"curves_{split}", formats)
            metric = measures.shown_metrics(rows, split)[0]
            gains = measures.compared(evidence, split, metric) if evidence else None
            if gains is not None:
                figure = new_figure(6.4, 3.6)
                draw_gains(figure.subplots(), gains, alone, names=names)
                written += save(figure, folder / f"gains_{split}", formats)
    return written


def plot_harm(
    found: ModelScores,
    clients: Clients,
    stem: Path,
    alone: Alone = None,
    formats: Sequence[str] = USUAL,
) -> list[Path]:
    """Gains sorted, gains by training rows, a histogram of alpha; the files written."""
    with style():
        count = 2 if clients.alpha is None else 3
        figure = new_figure(4.6 * count, 3.6)
        axes = figure.subplots(1, count, squeeze=False)[0]
        draw_gains(axes[0], found, alone, names=clients.names)
        draw_gains_by_rows(axes[1], found, clients, alone)
        if clients.alpha is not None:
            bins = np.linspace(0, 1, 21).tolist()
            axes[2].hist(clients.alpha, bins, color=COLORS["shared"], edgecolor="w")
            axes[2].set_xlabel("alpha, the weight of the shared model")
            axes[2].set_ylabel("clients")
        return save(figure, stem, formats)


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


def _draw_curve(axes: Any, curve: Curve, over: str, **look: Any) -> None:
    """A line over "rounds" or "bits", with a band where seeds differ."""
    across = curve.rounds if over == "rounds" else curve.bits
    every = max(len(across) // MARKED, 1)
    axes.plot(across, curve.mean, linewidth=1.8, markersize=4, markevery=every, **look)
    if (curve.high > curve.low).any():
        band = {"color": look["color"], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(across, curve.low, curve.high, **band)


def curves_figure(
    rows: list[Row],
    split: str,
    alone: Alone,
    gains: ModelScores | None = None,
    names: Sequence[str] = (),
) -> Any:
    """Metrics by rounds and by bits, a line for each model; gains below."""
    lines = {}
    for metric in measures.drawn_metrics(rows, split):
        found = measures.curves(rows, split, metric)
        labels = {model: label(model, alone) for model in LABELS}
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
    figure, grid = _panels(
        lines, split, f"Mean over clients, {split} rows{note}", gains is not None
    )
    if gains is not None:
        below = figure.add_subplot(grid[len(lines), :])
        draw_gains(below, gains, alone, names=names)
    return figure


def _sweep_figure(over: PyTree, rows: list[Row], split: str) -> Any:
    """The personal model for each value of a sweep."""
    import matplotlib

    values = jax.tree.leaves(over)
    replicas = range(len(values[0]))
    names = [", ".join(f"{float(leaf[at]):.3g}" for leaf in values) for at in replicas]
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    by_value = [[row for row in rows if row["seed"] == at] for at in replicas]
    looks = [
        {"color": shade, "marker": marker, "ls": dashes}
        for shade, marker, dashes in zip(shades, cycle(MARKERS), cycle(DASHES))
    ]
    lines = {
        metric: {
            name: (measures.curves(own, split, metric)["personal"], look)
            for name, look, own in zip(names, looks, by_value, strict=True)
        }
        for metric in measures.drawn_metrics(rows, split)
    }
    title = f"Personal model, mean over clients, {split} rows, by value of the sweep"
    return _panels(lines, split, title)[0]


def _panels(lines: dict, split: str, title: str, below: bool = False) -> Any:
    """A figure with a row for each metric and a column for rounds and bits.

    Returns:
        The figure and its grid, with an empty row at the end if ``below``.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    drawn = [curve for by_name in lines.values() for curve, _ in by_name.values()]
    columns = (
        ("rounds", "bits") if any(one.bits.any() for one in drawn) else ("rounds",)
    )
    height = len(lines)
    figure = new_figure(3.6 * len(columns) + 0.6, 2.5 * (height + below) + 0.5)
    grid = figure.add_gridspec(height + below, len(columns))
    for place, (metric, by_name) in enumerate(lines.items()):
        for column, over in enumerate(columns):
            axes = figure.add_subplot(grid[place, column])
            for name, (curve, look) in by_name.items():
                _draw_curve(axes, curve, over, label=name, **look)
            _bound(axes, metric)
            axes.set_ylabel(f"{split} {metric}" if column == 0 else "")
            axes.set_xlabel(ACROSS[over] if place == height - 1 else "")
            if over == "bits":
                axes.xaxis.set_major_formatter(EngFormatter(unit="bit"))
                axes.xaxis.set_major_locator(MaxNLocator(4))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = _legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)
    figure.axes[0].set_title(title, fontsize=9, color="#404040")
    return figure, grid


def _bound(axes: Any, metric: str) -> None:
    """No axis beyond 0 and 1 for a metric that lies between them."""
    known = entry(metric)
    if known is not None and known.facts.bounded:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0.0), min(high, 1.0))


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """How many labels fit side by side in this width in inches, five at most."""
    widest = 0.067 * max(map(len, labels), default=1) + 0.62  # letters, and a line
    return int(np.clip(width // widest, 1, min(len(labels), 5) or 1))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of runs: curves over rounds and bits, and what each client gains.

Colors are Okabe and Ito's, which readers with any color vision can tell apart.
matplotlib is imported when a figure is asked for, and only its object-oriented part:
no window, no global state.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedblend.gains import Evidence, Gain, gain_summary
from fedblend.report.alone import briefly
from fedblend.report.sentences import in_short
from fedblend.report.series import (
    Curve,
    Gains,
    Row,
    all_gains,
    curves,
    rows_of,
    shown_metrics,
    shown_splits,
)
from fedblend.simulation.run import Run

COLORS = {"shared": "#0072B2", "local": "#E69F00", "personal": "#009E73"}
HARM, UNSURE = "#D55E00", "#B0B0B0"
DASHES = {"shared": "-", "local": (0, (5, 2)), "personal": "-"}
LABELS = {
    "shared": "the shared model",
    "local": "training alone",
    "personal": "the personal model",
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
    "savefig.dpi": 150,
}


def plot_run(run: Run, path: Any = None) -> Any:
    """Curves of a run and its clients' gains, as a matplotlib figure.

    Seeds run side by side become a band; a sweep becomes one line for each value. The
    figure is saved to ``path`` if there is one, in the format of its suffix.
    """
    import matplotlib

    rows = rows_of(run.records)
    with matplotlib.rc_context(STYLE):
        splits = shown_splits(rows)
        if not splits:
            figure = new_figure(4.8, 3.2)
            figure.suptitle("Nothing was measured in this run")
        elif run.over is not None:
            figure = _sweep_figure(run, rows, splits[0])
        else:
            metric = shown_metrics(rows, splits[0])[0]
            gained = all_gains(run.evidence, splits[0], metric)
            first = gained[0] if gained else None
            figure = _curves_figure(rows, splits[0], run.alone, first)
        if path is not None:
            figure.savefig(path)
    return figure


def plot_rows(
    rows: list[Row],
    folder: Path,
    evidence: Evidence | None = None,
    alone: dict[str, Any] | None = None,
) -> list[Path]:
    """Write the figures of a run's rows, each as PNG and SVG; what was written.

    Args:
        rows: ``Record.row()`` of each block, with "seed" where there are several.
        folder: where to put the figures; made if it is not there.
        evidence: ``Run.evidence``, for the figure of the clients' gains.
        alone: ``Run.alone``.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for split in shown_splits(rows):
            written += save_both(
                _curves_figure(rows, split, alone), folder / f"curves_{split}"
            )
            metric = shown_metrics(rows, split)[0]
            gained = all_gains(evidence, split, metric) if evidence else []
            for first in gained[:1]:
                figure = new_figure(6.4, 3.2)
                draw_gains(figure.subplots(), first, alone=alone)
                written += save_both(figure, folder / f"gains_{split}")
    return written


def draw_curve(axes: Any, curve: Curve, over: str, **style: Any) -> None:
    """One line, with a band where seeds differ; ``over`` is "rounds" or "bits"."""
    across = curve.rounds if over == "rounds" else curve.bits
    axes.plot(across, curve.mean, linewidth=1.8, **style)
    if (curve.high > curve.low).any():
        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(across, curve.low, curve.high, **band)


def label(model: str, alone: dict[str, Any] | None) -> str:
    """What a model is called; of training alone, how long it took."""
    brief = briefly(alone) if model == "local" else ""
    return LABELS[model] + (f" ({brief})" if brief else "")


def draw_gains(
    axes: Any, gained: Gains, name: str = "", alone: dict[str, Any] | None = None
) -> None:
    """A bar with its interval for every client; colors say whose excludes zero."""
    gain = gained.gain
    order = np.argsort(gain.value, kind="stable")
    order = order[~np.isnan(gain.value[order])]
    across = np.arange(len(order))
    axes.bar(across, gain.value[order], width=0.9, color=colors_of(gain)[order])
    draw_intervals(axes, across, gain, order)
    axes.axhline(0, color="#404040", linewidth=0.8)
    axes.grid(axis="x", visible=False)
    said = in_short(gain_summary(gain), gained.reference)
    if gained.seeds > 1:
        said += f"; mean of {gained.seeds} seeds"
    axes.set_title(f"{name}\n{said}" if name else said)
    axes.set_xlabel("clients, sorted by gain; lines: 95 % intervals, gray: either way")
    other = label(gained.reference, alone)
    axes.set_ylabel(f"{gained.split} {gained.metric},\ngain over {other}")
    axes.set_xticks([])


def colors_of(gain: Gain) -> np.ndarray:
    """The color of every client: harmed, helped, or neither for sure."""
    sure = np.where(gain.helped, COLORS["personal"], UNSURE)
    return np.where(gain.harmed, HARM, sure)


def draw_intervals(
    axes: Any, across: np.ndarray, gain: Gain, order: np.ndarray
) -> None:
    """A thin line over every interval that has two ends."""
    low, high = gain.low[order], gain.high[order]
    ends = np.isfinite(low) & np.isfinite(high)
    axes.vlines(across[ends], low[ends], high[ends], color="#606060", linewidth=0.7)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_both(figure: Any, stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; what was written."""
    written = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in written:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return written


def _curves_figure(
    rows: list[Row],
    split: str,
    alone: dict[str, Any] | None,
    gained: Gains | None = None,
) -> Any:
    """Metrics by rounds and by bits, one line for each model."""
    lines = {}
    for metric in shown_metrics(rows, split):
        found = curves(rows, split, metric)
        labels = {model: label(model, alone) for model in LABELS}
        if _same(found.get("shared"), found.get("personal")):
            del found["personal"]
            labels["shared"] += ", which is also the personal one"
        lines[metric] = {
            labels[model]: (curve, {"color": COLORS[model], "ls": DASHES[model]})
            for model, curve in found.items()
        }
    seeds = len({row.get("seed") for row in rows})
    note = f"; bands: lowest to highest of {seeds} seeds" if seeds > 1 else ""
    title = f"Mean over clients, {split} rows{note}"
    return _panels(lines, split, title, gained, alone)


def _same(one: Curve | None, other: Curve | None) -> bool:
    if one is None or other is None:
        return False
    return np.array_equal(one.mean, other.mean, equal_nan=True)


def _sweep_figure(run: Run, rows: list[Row], split: str) -> Any:
    """The personal model of every value of a sweep."""
    import matplotlib

    values = jax.tree.leaves(run.over)
    names = [", ".join(f"{float(leaf[replica]):.3g}" for leaf in values)
             for replica in range(run.replicas or 1)]  # fmt: skip
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    lines = {
        metric: {
            name: (
                curves([row for row in rows if row["seed"] == replica], split, metric)[
                    "personal"
                ],
                {"color": shades[replica], "ls": "-"},
            )
            for replica, name in enumerate(names)
        }
        for metric in shown_metrics(rows, split)
    }
    title = f"Personal model, mean over clients, {split} rows, by value of the sweep"
    return _panels(lines, split, title, None, None)


def _panels(
    lines: dict, split: str, title: str, gained: Gains | None, alone: Any
) -> Any:
    """A row for each metric and a column for rounds and bits; gains below."""
    sent = any(
        curve.bits.any() for by_name in lines.values() for curve, _ in by_name.values()
    )
    columns = ("rounds", "bits") if sent else ("rounds",)
    height, below = len(lines), gained is not None
    figure = new_figure(3.6 * len(columns) + 0.6, 2.5 * (height + below) + 0.5)
    grid = figure.add_gridspec(height + below, len(columns))
    for place, (metric, by_name) in enumerate(lines.items()):
        for column, over in enumerate(columns):
            axes = figure.add_subplot(grid[place, column])
            for name, (curve, style) in by_name.items():
                draw_curve(axes, curve, over, label=name, **style)
            axes.set_ylabel(f"{split} {metric}" if column == 0 else "")
            _label_across(axes, over, last=place == height - 1)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 5))
    figure.axes[0].set_title(title, fontsize=9, color="#404040")
    if gained is not None:
        draw_gains(figure.add_subplot(grid[height, :]), gained, alone=alone)
    return figure


def _label_across(axes: Any, over: str, last: bool) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if over == "bits":
        axes.xaxis.set_major_formatter(EngFormatter(unit="bit"))
        axes.xaxis.set_major_locator(MaxNLocator(4))
    words = {"rounds": "rounds of communication",
             "bits": "bits sent, both ways, all clients"}  # fmt: skip
    axes.set_xlabel(words[over] if last else "")

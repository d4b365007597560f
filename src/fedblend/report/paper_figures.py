# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures for a paper: PDF of one column or two, with fonts that are embedded.

Lines differ in color, marker and dashes, so that they are told apart in gray print and
with any color vision. Colors are Okabe and Ito's. Text has 7 points or more at the
width of the column.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.report import measures
from fedblend.report.figures import new_figure
from fedblend.report.measures import Curve, Row

ONE, TWO = 3.3, 6.8
"""The widths of a column and of two, in inches."""
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
STYLE: Any = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
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
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # TrueType, which publishers accept
}
ACROSS = {"rounds": "rounds", "bits": "bits sent, both ways"}
MOST_COLUMNS = 6
"""Of a legend."""
MARKS = 8
"""Markers on a line, about."""


def looks() -> Iterator[dict[str, Any]]:
    """The color, marker and dashes of each line; 280 differ in one of them."""
    every = zip(cycle(COLORS), cycle(MARKERS), cycle(DASHES), strict=False)
    for color, marker, dashes in every:
        yield {"color": color, "marker": marker, "linestyle": dashes}


def draw(
    rows: Mapping[str, Sequence[Row]], tested: Sequence[Any], folder: Path
) -> list[Path]:
    """Write all figures of a comparison; the files written.

    Args:
        rows: those of every run, see ``measures.rows_of``.
        tested: the differences between runs, as ``runs.paired`` finds them.
        folder: made if it is missing.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        first = next(iter(rows.values()))
        for split in measures.shown_splits(first)[:1]:
            metric = measures.shown_metrics(first, split)[0]
            found = [measures.curves(own, split, metric) for own in rows.values()]
            lines = {name: of["personal"] for name, of in zip(rows, found, strict=True)}
            # Training alone, if it is the same in all runs that have it.
            ends = {float(of["local"].mean[-1]) for of in found if "local" in of}
            alone = ends.pop() if len(ends) == 1 else None
            for name, width, across in (
                *((over, ONE, (over,)) for over in ACROSS),
                ("curves", TWO, tuple(ACROSS)),
            ):
                figure = new_figure(width, 2.4)
                every = figure.subplots(1, len(across), sharey=True, squeeze=False)[0]
                for axes, over in zip(every, across, strict=True):
                    _draw_lines(axes, lines, over, alone)
                every[0].set_ylabel(f"{split} {metric}")
                _legend(figure)
                written.append(_save(figure, folder / f"{name}.pdf"))
        if tested:
            written.append(_save(_differences(tested), folder / "differences.pdf"))
            written.append(_save(_clients(tested), folder / "clients.pdf"))
    return written


def draw_sweep(
    values: Sequence[float],
    models: Mapping[str, np.ndarray],
    key: str,
    label: str,
    path: Path,
) -> Path:
    """Write the figure of a metric by the values of a key.

    Args:
        values: of the key.
        models: each model's metric at them, [values, seeds].
        key: the name of the axis.
        label: the metric.
        path: of the PDF.
    """
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(ONE, 2.4)
        axes = figure.subplots()
        for (model, found), look in zip(models.items(), looks(), strict=False):
            error = found.std(axis=1, ddof=1) if found.shape[1] > 1 else None
            axes.errorbar(
                values,
                found.mean(axis=1),
                error,
                label=model,
                **look,
                capsize=2,
                elinewidth=0.7,
            )
        axes.set_xlabel(key)
        axes.set_ylabel(label)
        if min(values) > 0 and max(values) / min(values) > 50:
            axes.set_xscale("log")
        _legend(figure)
        return _save(figure, path)


def _draw_lines(
    axes: Any, lines: Mapping[str, Curve], over: str, alone: float | None
) -> None:
    """A line for each run, and one for training alone where all runs have the same."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for number, ((name, curve), look) in enumerate(
        zip(lines.items(), looks(), strict=False)
    ):
        across = curve.rounds if over == "rounds" else curve.bits
        step = max(1, len(across) // MARKS)
        # Markers of lines that lie on each other alternate.
        every = (number % step, step)
        axes.plot(across, curve.mean, label=name, **look, markevery=every)
        if (curve.high > curve.low).any():
            band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(across, curve.low, curve.high, **band)
    trained = [of for curve in lines.values() for of in (curve.low[1:], curve.high[1:])]
    if alone is not None:
        look = {"color": "#606060", "linewidth": 0.9, "linestyle": (0, (6, 3))}
        axes.axhline(alone, label="training alone", **look)
        trained.append(np.array([alone]))
    # Untrained models, at chance, would press all else together.
    seen = np.concatenate(trained)
    seen = seen[np.isfinite(seen)]
    if seen.size and seen.max() > seen.min():
        room = 0.06 * (seen.max() - seen.min())
        axes.set_ylim(seen.min() - room, seen.max() + room)
    axes.set_xlabel(ACROSS[over])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if over == "bits":
        axes.xaxis.set_major_formatter(EngFormatter(unit="bit"))
        axes.xaxis.set_major_locator(MaxNLocator(4))


def _legend(figure: Any) -> None:
    """The legend above the axes, with as many columns as fit into the figure."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for columns in range(min(len(labels), MOST_COLUMNS), 0, -1):
        legend = figure.legend(
            handles, labels, loc="outside upper center", ncols=columns
        )
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            return
        legend.remove()


def _differences(tested: Sequence[Any]) -> Any:
    """The mean gain of every pair with its interval; filled where significant."""
    shown = [one for one in tested if np.isfinite(one.gain.mean[0])]
    figure = new_figure(ONE, 0.8 + 0.22 * max(len(shown), 1))
    axes = figure.subplots()
    for place, one in enumerate(shown):
        mean, low, high = one.gain.mean
        color = COLORS[0] if one.significant else "#606060"
        axes.plot([low, high], [place, place], color=color, linewidth=1)
        face = color if one.significant else "white"
        axes.plot(mean, place, "o", color=color, markerfacecolor=face)
    axes.axvline(0, color="#404040", linewidth=0.8, linestyle=(0, (3, 2)))
    axes.set_yticks(range(len(shown)), [f"{one.name} - {one.other}" for one in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    metric = shown[0].metric if shown else ""
    axes.set_xlabel(f"gain in {metric}, 95 % interval\n(filled: significant, Holm)")
    return figure


def _clients(tested: Sequence[Any]) -> Any:
    """Every client's gain, sorted: of all methods over the one they have in common."""
    reference = tested[-1].other
    pairs = [
        one
        for one in tested
        if one.other == reference and one.metric == tested[-1].metric
    ]
    figure = new_figure(ONE, 2.4)
    axes = figure.subplots()
    for one, look in zip(pairs, looks(), strict=False):
        gains = np.sort(one.gain.value[np.isfinite(one.gain.value)])
        across = np.linspace(0, 100, len(gains)) if len(gains) > 1 else [50.0]
        step = max(1, len(gains) // MARKS)
        axes.plot(across, gains, label=one.name, **look, markevery=step)
    axes.axhline(0, color="#404040", linewidth=0.8)
    axes.set_xlabel("clients, sorted by gain (%)")
    axes.set_ylabel(f"gain in {pairs[0].metric}\nover {reference}")
    _legend(figure)
    return figure


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"CreationDate": None})
    return path

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures that several claims draw: curves over seeds, in one style.

Figures fit a paper: text has 7 points or more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

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


@contextmanager
def panels(
    rows: int, columns: int, *, width: float = 3.2, height: float = 2.6
) -> Iterator[tuple[Any, np.ndarray]]:
    """A figure with a grid of axes, ``axes[row, column]``."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        size = width * columns, height * rows
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False)


def shades(count: int) -> list[Any]:
    """Colors for an ordered family of curves, from dark to light."""
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, count)))


def banded(
    axes: Any, across: Sequence[float] | np.ndarray, values: Any, **style: Any
) -> None:
    """The mean of ``values[seeds, points]``, and a band from lowest to highest.

    A single row is a plain line.
    """
    values = np.atleast_2d(np.asarray(values, np.float64))
    (line,) = axes.plot(across, values.mean(axis=0), linewidth=1.5, **style)
    if len(values) > 1:
        low, high = values.min(axis=0), values.max(axis=0)
        axes.fill_between(
            across, low, high, color=line.get_color(), alpha=0.2, linewidth=0
        )


def legend_above(figure: Any, axes: Any, most: int = 6) -> None:
    """One legend for the whole figure, of the lines of one of its axes."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), most)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures that compare methods, each of them the model of some run."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from fedblend.report.figures import STYLE, draw_curve, draw_gains, new_figure, save_both
from fedblend.report.series import Curve, Gains

PALETTE = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Colors that can be told apart by everybody, a method each."""


def plot_methods(lines: Mapping[str, Curve], title: str, stem: Path) -> list[Path]:
    """A line for each method; what was written."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = new_figure(6.4, 3.8)
        axes = figure.subplots()
        for (name, curve), color in zip(lines.items(), cycle(PALETTE)):
            draw_curve(axes, curve, "rounds", label=name, color=color)
        # Untrained models, at chance, would press all else against the top.
        axes.set_ylim(min(curve.low[1:].min() for curve in lines.values()) - 0.01)
        axes.set_xlabel("rounds")
        axes.set_ylabel("test accuracy, mean over clients")
        axes.set_title(title)
        axes.legend(loc="lower right")
        return save_both(figure, stem)


def plot_method_gains(
    gains: Mapping[str, Gains], stem: Path, alone: dict[str, Any] | None = None
) -> list[Path]:
    """Panels, one for each method's gains, two in a row; what was written."""
    import matplotlib

    rows = -(-len(gains) // 2)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(9.0, 3.4 * rows)
        panels = figure.subplots(rows, 2, sharey=True, squeeze=False)
        for axes, (name, gained) in zip(panels.flat, gains.items(), strict=False):
            draw_gains(axes, gained, name, alone)
        for axes in panels[:, 1]:
            axes.set_ylabel("")
        for axes in panels.flat[len(gains) :]:
            axes.set_visible(False)
        return save_both(figure, stem)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures that compare methods, each of them the model of some run."""

from collections.abc import Mapping
from pathlib import Path

from fedblend.report.figures import (
    STYLE,
    draw_curve,
    draw_gains,
    new_figure,
    save_both,
)
from fedblend.report.series import Curve, Gains


def plot_methods(
    lines: Mapping[str, tuple[Curve, str]], title: str, stem: Path
) -> list[Path]:
    """A line for each method, given as its curve and colour; what was written."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = new_figure(6.4, 3.8)
        axes = figure.subplots()
        for name, (curve, colour) in lines.items():
            draw_curve(axes, curve, "rounds", label=name, color=colour)
        # Untrained models, at chance, would press all else against the top.
        axes.set_ylim(min(curve.low[1:].min() for curve, _ in lines.values()) - 0.01)
        axes.set_xlabel("rounds")
        axes.set_ylabel("test accuracy, mean over clients")
        axes.set_title(title)
        axes.legend(loc="lower right")
        return save_both(figure, stem)


def plot_method_gains(gains: Mapping[str, Gains], stem: Path) -> list[Path]:
    """Panels side by side, one for each method's gains; what was written."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = new_figure(4.5 * len(gains), 3.4)
        panels = figure.subplots(1, len(gains), sharey=True, squeeze=False)[0]
        for axes, (name, gained) in zip(panels, gains.items(), strict=True):
            draw_gains(axes, gained, name)
        for axes in panels[1:]:
            axes.set_ylabel("")
        return save_both(figure, stem)

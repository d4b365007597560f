# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Curves with 95 % confidence, as the paper draws them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedblend_reproductions.mixed.task import Curves
from fedblend_reproductions.plots import legend_above, panels, shades


def confident(axes: Any, across: Any, values: Any, **style: Any) -> None:
    """The mean of ``values[seeds, points]``, and the 95 % confidence band of it."""
    from scipy.stats import t

    values = np.asarray(values, np.float64)
    seeds, mean = len(values), values.mean(axis=0)
    (line,) = axes.plot(across, mean, linewidth=1.5, **style)
    if seeds > 1:
        error = values.std(axis=0, ddof=1) / np.sqrt(seeds)
        wide = t.ppf(0.975, seeds - 1) * error
        axes.fill_between(
            across,
            mean - wide,
            mean + wide,
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )


def focus(axes: Any, losses: Sequence[np.ndarray]) -> None:
    """Show mean losses, each ``[seeds, points]``, up to that at the start.

    What is worse than the start leaves the panel, and so does a band that is wider.
    """
    means = np.concatenate([those[:, 1:].mean(axis=0) for those in losses])
    low, high = means.min(), min(means.max(), losses[0][:, 0].mean())
    room = 0.05 * (high - low)
    axes.set_ylim(low - room, high + room)


def by_way(
    found: Mapping[str, Mapping[int, Curves]], label: str, highest: float
) -> Any:
    """AUC above and loss below over rounds, a column for each way.

    Args:
        found: curves by way, and by the number that ``label`` names.
        label: of a curve, with a place for its number.
        highest: loss shown.
    """
    with panels(2, len(found), width=3.6) as (figure, axes):
        for column, (how, of) in enumerate(found.items()):
            above, below = axes[:, column]
            above.set_title(how)
            for place, color in zip(of, shades(len(of)), strict=True):
                style = {"color": color, "label": label.format(place)}
                rounds, values = of[place].rounds, of[place].values
                confident(above, rounds, values["auc"], **style)
                confident(below, rounds, values["loss"], **style)
            above.set_ylim(0.4, 1)
            below.set_ylim(0.3, highest)
            below.set_xlabel("rounds")
        axes[0, 0].set_ylabel("AUC, all test faces")
        axes[1, 0].set_ylabel("loss, all test faces")
        legend_above(figure, axes[0, 0])
    return figure

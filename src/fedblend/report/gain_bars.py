# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The gains of clients, drawn: bars with intervals, and points by training rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedblend.report import measures
from fedblend.report.looks import COLORS, HARM, UNSURE, Alone, label
from fedblend.report.measures import Clients, ModelScores
from fedblend.stats.gains import Gain, gain_summary

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

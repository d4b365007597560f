# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who gains by a personal model and who is harmed, client by client.

A client is harmed if its personal model serves it worse than another one that it could
have had: the shared model, or one that it trains alone. It is called so only where the
95 % interval of what it gains lies below zero; see ``gains``.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.gains import Evidence, gain_summary
from fedblend.report.alone import in_full
from fedblend.report.figures import (
    COLORS,
    STYLE,
    colors_of,
    draw_gains,
    draw_intervals,
    label,
    new_figure,
    save_both,
)
from fedblend.report.sentences import in_words
from fedblend.report.series import Gains, all_gains


class Clients(NamedTuple):
    """What is known of the measured clients, one entry for each."""

    ids: np.ndarray
    names: list[str]
    train: np.ndarray
    test: np.ndarray
    alpha: np.ndarray | None = None
    """The weight of the shared model, where there is one."""


class Comparison(NamedTuple):
    """One metric of all models, means over seeds; a gain is an improvement."""

    split: str
    metric: str
    values: dict[str, np.ndarray]
    gains: dict[str, Gains]
    """The personal model's, over each other model that was measured."""


def compared(evidence: Evidence, split: str, metric: str) -> Comparison | None:
    """The comparison, or None where there is no other model to compare with."""
    gains = {one.reference: one for one in all_gains(evidence, split, metric)}
    if not gains:
        return None
    values = {
        model: np.mean([of[split][model][metric] for of in evidence.measured], axis=0)
        for model in evidence.measured[0][split]
    }
    return Comparison(split, metric, values, gains)


def harm_rows(found: Comparison, clients: Clients) -> list[dict[str, Any]]:
    """A row for every client, those that are harmed most first.

    ``harm`` is the largest loss to another model, 0 for whom there is none, by the
    measured values alone; ``gain_low``, ``gain_high`` and ``harmed`` are about the
    first of the other models, training alone where it was measured. A client without
    rows in the split has empty cells.
    """
    gains = {name: one.gain for name, one in found.gains.items()}
    harm = np.maximum(-np.stack([of.value for of in gains.values()]).min(axis=0), 0)
    rows = []
    for place in np.argsort(-harm, kind="stable"):
        row: dict[str, Any] = {
            "id": int(clients.ids[place]),
            "name": clients.names[place],
            "train": int(clients.train[place]),
            "test": int(clients.test[place]),
        }
        if clients.alpha is not None:
            row["alpha"] = float(clients.alpha[place])
        for name in ("shared", "local", "personal"):
            if name in found.values:
                row[f"{name}_{found.metric}"] = _cell(found.values[name][place])
        for name, of in gains.items():
            row[f"gain_over_{name}"] = _cell(of.value[place])
        row["harm"] = _cell(harm[place])
        for number, (name, of) in enumerate(gains.items()):
            start, end = (
                ("gain", "") if number == 0 else (f"gain_over_{name}", f"_{name}")
            )
            row[f"{start}_low"] = _cell(of.low[place])
            row[f"{start}_high"] = _cell(of.high[place])
            row["harmed" if not end else f"harmed_by{end}"] = _verdict(of, place)
        rows.append(row)
    return rows


def _verdict(gain: Any, place: int) -> str:
    if gain.not_finite[place]:
        return "not finite"
    if np.isnan(gain.value[place]):
        return ""
    return "yes" if gain.harmed[place] else "no"


def _cell(value: Any) -> float | str:
    return float(value) if np.isfinite(value) else ""


def sentence(found: Comparison, alone: dict[str, Any] | None = None) -> str:
    """Who is harmed and by how much, in words."""
    parts = [
        in_words(gain_summary(one.gain), name) for name, one in found.gains.items()
    ]
    if alone is not None:
        parts.append(f"Training alone: {in_full(alone)}")
    return f"{found.split} {found.metric}: {'. '.join(parts)}"


def plot_harm(
    found: Comparison,
    clients: Clients,
    stem: Path,
    alone: dict[str, Any] | None = None,
) -> list[Path]:
    """Sorted gains, gain against rows, and alpha's histogram; what was written."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        count = 2 if clients.alpha is None else 3
        figure = new_figure(4.6 * count, 3.4)
        axes = figure.subplots(1, count, squeeze=False)[0]
        first = next(iter(found.gains.values()))
        draw_gains(axes[0], first, alone=alone)
        _draw_by_rows(axes[1], first, clients, alone)
        if clients.alpha is not None:
            bins = np.linspace(0, 1, 21).tolist()
            axes[2].hist(clients.alpha, bins, color=COLORS["shared"], edgecolor="w")
            axes[2].set_xlabel("alpha, the weight of the shared model")
            axes[2].set_ylabel("clients")
        return save_both(figure, stem)


def _draw_by_rows(
    axes: Any, gained: Gains, clients: Clients, alone: dict[str, Any] | None
) -> None:
    """The gains against the clients' training rows."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    gain = gained.gain
    known = np.flatnonzero(np.isfinite(gain.value))
    across = np.asarray(clients.train, float)[known]
    draw_intervals(axes, across, gain, known)
    axes.scatter(across, gain.value[known], c=colors_of(gain)[known], s=14, zorder=3)
    axes.axhline(0, color="#404040", linewidth=0.8)
    axes.set_xlabel("training rows of the client")
    axes.set_ylabel(f"gain over {label(gained.reference, alone)}")
    if known.size:  # there is no logarithm of nothing
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())

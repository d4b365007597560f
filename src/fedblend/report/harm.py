# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who gains by a personal model and who is harmed, client by client.

A client is harmed if its personal model serves it worse than another one that it could
have had: the shared model, or one that it trains alone.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend.metrics import HIGHER_IS_BETTER
from fedblend.report.alone import in_full
from fedblend.report.figures import (
    COLOURS,
    HARM,
    STYLE,
    draw_gains,
    label,
    new_figure,
    save_both,
)
from fedblend.report.series import Gains
from fedblend.runtime.record import Measured

REFERENCES = ("local", "shared")
THAN = {"local": "by training alone", "shared": "with the shared model"}


class Clients(NamedTuple):
    """What is known of the measured clients, one entry for each."""

    ids: np.ndarray
    names: list[str]
    train: np.ndarray
    test: np.ndarray
    alpha: np.ndarray | None = None
    """The weight of the shared model, where there is one."""


class Comparison(NamedTuple):
    """One metric of all models; a gain is an improvement, whichever way is better."""

    split: str
    metric: str
    values: dict[str, np.ndarray]
    gains: dict[str, np.ndarray]
    """The personal model's, over each other model that was measured."""


def compared(measured: Measured, split: str, metric: str) -> Comparison | None:
    """The comparison, or None where there is no other model to compare with."""
    models = {name: of[metric] for name, of in measured.get(split, {}).items()}
    others = [name for name in REFERENCES if name in models]
    own = models.get("personal")
    if own is None or all(_same(own, models[name]) for name in others):
        return None
    sign = 1 if HIGHER_IS_BETTER[metric.partition("@")[0]] else -1
    gains = {name: sign * (own - models[name]) for name in others}
    return Comparison(split, metric, models, gains)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def harm_rows(found: Comparison, clients: Clients) -> list[dict[str, Any]]:
    """A row for every client, those that are harmed most first.

    ``harm`` is the largest loss to another model, 0 for whom there is none; a client
    without rows in the split has empty cells.
    """
    gains = np.stack(list(found.gains.values()))
    harm = np.maximum(-gains.min(axis=0), 0)
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
        for name, gain in found.gains.items():
            row[f"gain_over_{name}"] = _cell(gain[place])
        row["harm"] = _cell(harm[place])
        rows.append(row)
    return rows


def _cell(value: Any) -> float | str:
    return "" if np.isnan(value) else float(value)


def sentence(found: Comparison, alone: dict[str, Any] | None = None) -> str:
    """Who is harmed and by how much, in words."""
    parts = []
    for name, gain in found.gains.items():
        known = gain[~np.isnan(gain)]
        lost = -known[known < 0]
        of = f"{len(lost)} of {len(known)} clients do worse than {THAN[name]}"
        if lost.size:
            of += f", by {lost.mean():.3g} on average and {lost.max():.3g} at worst"
        parts.append(of)
    if alone is not None:
        parts.append(f"training alone: {in_full(alone)}")
    return f"{found.split} {found.metric}: {'; '.join(parts)}"


def plot_harm(
    found: Comparison,
    clients: Clients,
    stem: Path,
    alone: dict[str, Any] | None = None,
) -> list[Path]:
    """Sorted gains, gain against rows, and alpha's histogram; what was written."""
    import matplotlib
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    with matplotlib.rc_context(STYLE):
        count = 2 if clients.alpha is None else 3
        figure = new_figure(4.2 * count, 3.4)
        axes = figure.subplots(1, count, squeeze=False)[0]
        other, gain = next(iter(found.gains.items()))
        known = np.sort(gain[~np.isnan(gain)])
        sorted_gains = Gains(known, found.metric, found.split, other, 1)
        draw_gains(axes[0], sorted_gains, alone=alone)
        colours = np.where(gain < 0, HARM, COLOURS["personal"])
        axes[1].scatter(clients.train, gain, c=colours, s=14)
        axes[1].axhline(0, color="#404040", linewidth=0.8)
        axes[1].set_xscale("log")
        axes[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes[1].xaxis.set_minor_formatter(NullFormatter())
        axes[1].set_xlabel("training rows of the client")
        axes[1].set_ylabel(f"gain over {label(other, alone)}")
        if clients.alpha is not None:
            bins = np.linspace(0, 1, 21).tolist()
            axes[2].hist(clients.alpha, bins, color=COLOURS["shared"], edgecolor="w")
            axes[2].set_xlabel("alpha, the weight of the shared model")
            axes[2].set_ylabel("clients")
        return save_both(figure, stem)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is shown of the movie recommender: curves, and what a client pays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedblend_reproductions.mixed.figures import confident
from fedblend_reproductions.mixed.movies import WAYS
from fedblend_reproductions.plots import legend_above, panels

TITLES = {"Adam": "Adam at the server", "plain": "plain steps"}
FORMS = {"pairs": "baseline", "products": "baseline,\nno pairs"}


def table(
    recall: Mapping[str, np.ndarray],
    sent: Mapping[str, float],
    flops: Mapping[str, float],
    ways: Sequence[str],
) -> list[list[str]]:
    """Recall, kilobytes and operations of the methods, and what is saved of them."""

    def line(label: str, step: float) -> list[str]:
        saved = (1 - sent[label] / sent["baseline"], 1 - step / flops["pairs"])
        shown = ["", ""] if label == "baseline" else [f"{part:.3%}" for part in saved]
        return [
            label,
            f"{recall[label].mean():.4f}",
            f"{sent[label]:.1f}",
            shown[0],
            f"{step / 1e6:.4g}",
            shown[1],
        ]

    return [
        ["", "recall@10", "kB a round", "saved", "Mflop a step", "saved"],
        line("baseline", flops["pairs"]),
        *(line(how, flops[how]) for how in (*ways, "clients alone")),
    ]


def curves(found: Mapping[str, Mapping[str, Any]]) -> Any:
    """Recall over rounds, a panel for each optimizer."""
    with panels(1, len(found), width=4.2, height=3.0) as (figure, axes):
        for place, (name, those) in enumerate(found.items()):
            for number, (label, of) in enumerate(those.items()):
                confident(
                    axes[0, place],
                    of["rounds"],
                    of["recall@10"],
                    color=f"C{number}",
                    label=label,
                    linestyle="-" if label in WAYS else "--",
                )
            axes[0, place].set_title(TITLES[name])
            axes[0, place].set_xlabel("rounds")
            axes[0, place].set_ylim(bottom=0)
        axes[0, 0].set_ylabel("recall@10, test users")
        legend_above(figure, axes[0, 0], 3 * len(found))
    return figure


def costs(
    sent: Mapping[str, float], flops: Mapping[str, float], ways: Sequence[str]
) -> Any:
    """What a client sends and receives in a round, and computes in a step."""
    millions = {label: one / 1e6 for label, one in flops.items()}
    bars = (
        ("kB of a client and round", sent, ("baseline", *ways)),
        ("Mflop of a client's step", millions, (*FORMS, *ways)),
    )
    with panels(1, 2, width=4.2, height=3.0) as (figure, axes):
        for at, (title, values, labels) in zip(axes[0], bars, strict=True):
            heights = [values[label] for label in labels]
            drawn = at.bar(
                [FORMS.get(label, label) for label in labels],
                heights,
                color=["C1" if label in WAYS else "C0" for label in labels],
            )
            at.bar_label(drawn, fmt="{:.4g}", padding=2)
            at.set_yscale("log")
            at.set_ylim(min(heights) / 4, max(heights) * 3)
            at.set_title(title)
            at.grid(axis="x", visible=False)
    return figure

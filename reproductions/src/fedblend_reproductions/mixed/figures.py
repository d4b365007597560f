# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Figures and tables of Mixed FL's claims: curves with 95 % confidence, as the paper
draws them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedblend_reproductions.mixed import text
from fedblend_reproductions.mixed.early_stopping import Ended
from fedblend_reproductions.mixed.task import ALGORITHMS, Curves, How, Task
from fedblend_reproductions.plots import legend_above, panels, shades

OPTIMIZERS = {"Adam": "Adam at the server", "plain": "plain steps"}
FORMS = {"pairs": "baseline", "products": "baseline,\nno pairs"}


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


def by_algorithm(
    found: Mapping[str, Mapping[int, Curves]], label: str, highest: float
) -> Any:
    """AUC above and loss below over rounds, a column for each algorithm.

    Args:
        found: curves by algorithm, and by the number that ``label`` names.
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


def character_table(
    task: Task, rates: dict[str, float], ends: dict[str, Ended]
) -> list[list[str]]:
    """Rates, rounds and what is reached on every source."""
    sources = [name.partition("@")[2] for name in task.measures if "accuracy" in name]
    head = ["", "rate of the paper", "rounds", "both", *sources, "loss, both"]

    def row(name: str, of: Ended) -> list[str]:
        best = {metric: of.at_best(metric) for metric in of.curves.values}
        return [
            name,
            f"{rates[name] / task.weights[0]:g}",
            f"{of.curves.rounds[of.validation.argmax(axis=1)].mean():.0f}",
            _spread(100 * text.measured_on("both", best, "accuracy"), 2),
            *(_spread(100 * best[f"accuracy@{source}"], 2) for source in sources),
            _spread(text.measured_on("both", best, "loss"), 3),
        ]

    return [head, *(row(name, of) for name, of in ends.items())]


def _spread(values: np.ndarray, digits: int) -> str:
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def character_curves(ends: dict[str, Ended]) -> Any:
    """Accuracy and loss over rounds, a column a source."""
    with panels(2, len(text.TITLES), width=3.8) as (figure, axes):
        for column, (source, title) in enumerate(text.TITLES.items()):
            axes[0, column].set_title(title)
            axes[1, column].set_xlabel("rounds")
            for row, metric in enumerate(("accuracy", "loss")):
                for number, (name, of) in enumerate(ends.items()):
                    values = text.measured_on(source, of.curves.values, metric)
                    confident(
                        axes[row, column],
                        of.curves.rounds[1:],
                        values[:, 1:],
                        color=f"C{number}",
                        label=name,
                        linestyle="-" if name in ALGORITHMS else "--",
                    )
            focus(
                axes[1, column],
                [
                    text.measured_on(source, of.curves.values, "loss")
                    for of in ends.values()
                ],
            )
        axes[0, 0].set_ylabel("accuracy, test rows")
        axes[1, 0].set_ylabel("loss, test rows")
        legend_above(figure, axes[0, 0], 7)
    return figure


def movie_table(
    recall: Mapping[str, np.ndarray],
    sent: Mapping[str, float],
    flops: Mapping[str, float],
    algorithms: Sequence[How],
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
        *(line(how, flops[how]) for how in (*algorithms, "clients alone")),
    ]


def movie_curves(found: Mapping[str, Mapping[str, Any]]) -> Any:
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
                    linestyle="-" if label in ALGORITHMS else "--",
                )
            axes[0, place].set_title(OPTIMIZERS[name])
            axes[0, place].set_xlabel("rounds")
            axes[0, place].set_ylim(bottom=0)
        axes[0, 0].set_ylabel("recall@10, test users")
        legend_above(figure, axes[0, 0], 3 * len(found))
    return figure


def movie_costs(
    sent: Mapping[str, float], flops: Mapping[str, float], algorithms: Sequence[How]
) -> Any:
    """What a client sends and receives in a round, and computes in a step."""
    millions = {label: one / 1e6 for label, one in flops.items()}
    bars = (
        ("kB of a client and round", sent, ("baseline", *algorithms)),
        ("Mflop of a client's step", millions, (*FORMS, *algorithms)),
    )
    with panels(1, 2, width=4.2, height=3.0) as (figure, axes):
        for at, (title, values, labels) in zip(axes[0], bars, strict=True):
            heights = [values[label] for label in labels]
            drawn = at.bar(
                [FORMS.get(label, label) for label in labels],
                heights,
                color=["C1" if label in ALGORITHMS else "C0" for label in labels],
            )
            at.bar_label(drawn, fmt="{:.4g}", padding=2)
            at.set_yscale("log")
            at.set_ylim(min(heights) / 4, max(heights) * 3)
            at.set_title(title)
            at.grid(axis="x", visible=False)
    return figure

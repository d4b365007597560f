# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M4's table and figure."""

from typing import Any

import numpy as np

from fedblend_reproductions.mixed import text
from fedblend_reproductions.mixed.early_stopping import Ended
from fedblend_reproductions.mixed.figures import confident, focus
from fedblend_reproductions.mixed.task import Task
from fedblend_reproductions.plots import legend_above, panels

WAYS = ("parallel", "one_way", "two_way")


def table(
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


def drawn(ends: dict[str, Ended]) -> Any:
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
                        linestyle="-"
                        if name in ("parallel", "one_way", "two_way")
                        else "--",
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

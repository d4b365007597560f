# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a comparison of methods comes to: a table, curves, and who is better."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedblend.papers.apfl.runs import Row
from fedblend.papers.drawing import banded, legend_above, panels

Rows = Mapping[str, Row]


def is_apfl(label: str) -> bool:
    """Whether a label is one of APFL's."""
    return label.startswith("APFL")


def chosen(rows: Rows, labels: Iterable[str]) -> str:
    """The label with the best validation accuracy in the last round."""
    return max(
        labels,
        key=lambda label: rows[label].curves["validation"]["accuracy"][:, -1].mean(),
    )


def beyond(rows: Rows, ours: str, other: str) -> tuple[float, float]:
    """How much more test accuracy, in the mean over clients and seeds in the last
    round, and its standard error over clients.
    """
    gaps = (rows[ours].clients - rows[other].clients).mean(axis=0)
    gaps = gaps[np.isfinite(gaps)]
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))


def table(rows: Rows, paper: Mapping[str, str]) -> list[list[str]]:
    """A row a label; ``paper`` has its accuracies, where it gives one."""
    head = ["", "rate", "training loss", "test accuracy", "best round", "paper"]
    return [
        head,
        *(
            [
                label,
                f"{row.rate:g}",
                _spread(row.curves["train"]["loss"][:, -1], 4),
                _spread(100 * row.last, 2),
                _spread(100 * row.best, 2),
                paper.get(label, ""),
            ]
            for label, row in rows.items()
        ),
    ]


def _spread(values: np.ndarray, digits: int) -> str:
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def curves(groups: Mapping[str, Rows], lowest: float | None = None) -> Any:
    """Training loss above, test accuracy below, over rounds; a column for each group.

    Args:
        groups: rows by the name of their column.
        lowest: of the accuracies shown.
    """
    with panels(2, len(groups), width=4.2) as (figure, axes):
        for place, (name, rows) in enumerate(groups.items()):
            above, below = axes[:, place]
            above.set_title(name)
            for number, (label, row) in enumerate(rows.items()):
                style = {"color": f"C{number % 10}", "label": label}
                if number >= 10:
                    style["linestyle"] = "--"
                banded(above, row.rounds, row.curves["train"]["loss"], **style)
                banded(below, row.rounds, row.curves["test"]["accuracy"], **style)
            above.set_yscale("log")
            below.set_ylim(bottom=lowest)
            below.set_xlabel("communication rounds")
        axes[0, 0].set_ylabel("training loss")
        axes[1, 0].set_ylabel("test accuracy")
        legend_above(figure, axes[0, 0], 4)
    return figure


def alphas(rows: Rows) -> dict[str, dict[str, float]]:
    """Where the mixing weights of clients and seeds ended, of rows that have them."""
    return {
        label: {
            "mean": float(row.alphas.mean()),
            "lowest": float(row.alphas.min()),
            "highest": float(row.alphas.max()),
        }
        for label, row in rows.items()
        if row.alphas.size
    }


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Spearman's, with mean ranks for ties; 0 where all of one are equal."""
    ranks = [
        ((x[:, None] > x[None]).sum(1) + (x[:, None] >= x[None]).sum(1)) / 2
        for x in (left, right)
    ]
    if min(rank.std() for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Results of a comparison of methods: tables, curves and differences."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedblend_reproductions.apfl.runs import Row, named
from fedblend_reproductions.plots import banded, legend_above, panels

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
    """The difference in test accuracy after the last round, in the mean over clients
    and seeds, and its standard error over clients.
    """
    gaps = (rows[ours].clients - rows[other].clients).mean(axis=0)
    gaps = gaps[np.isfinite(gaps)]
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))


def table(rows: Rows, paper: Mapping[str, str]) -> list[list[str]]:
    """A row for each label; ``paper`` has the paper's accuracies by label."""
    head = ["", "rate", "training loss", "test accuracy", "best round", "paper"]
    return [
        head,
        *(
            [
                label,
                named(row.rate),
                _spread(row.curves["train"]["loss"][:, -1], 4),
                _spread(100 * row.last, 2),
                _spread(100 * row.best, 2),
                paper.get(label, ""),
            ]
            for label, row in rows.items()
        ),
    ]


def grouped(groups: Mapping[str, Rows]) -> list[list[str]]:
    """The tables of several groups as one, without a paper's accuracies."""
    first, *_ = tables = {name: table(rows, {}) for name, rows in groups.items()}
    return [
        ["", *tables[first][0][:-1]],
        *([name, *line[:-1]] for name, those in tables.items() for line in those[1:]),
    ]


def points(gap: tuple[float, float]) -> str:
    """A gap and its error, see ``beyond``, in points."""
    return f"{100 * gap[0]:+.2f} (error {100 * gap[1]:.2f})"


def _spread(values: np.ndarray, digits: int) -> str:
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def curves(groups: Mapping[str, Rows], lowest: float | None = None) -> Any:
    """Training loss and test accuracy over rounds, rivals of APFL dashed.

    A group is a column, with its loss above; a single one has them side by side. A
    model that diverges leaves the panel.

    Args:
        groups: rows by the name of their column.
        lowest: of the accuracies shown.
    """
    shape = (2, len(groups)) if len(groups) > 1 else (1, 2)
    wide = 4.2 if len(groups) < 3 else 3.2
    tall = 2.6 if len(groups) > 1 else 3.4
    with panels(*shape, width=wide, height=tall) as (figure, axes):
        columns = axes.T if len(groups) > 1 else axes
        for (above, below), (name, rows) in zip(columns, groups.items(), strict=True):
            above.set_title(name)
            for number, (label, row) in enumerate(rows.items()):
                style = {"color": f"C{number % 10}", "label": label}
                style["linestyle"] = "-" if is_apfl(label) else "--"
                banded(above, row.rounds, row.curves["train"]["loss"], **style)
                banded(below, row.rounds, row.curves["test"]["accuracy"], **style)
            above.set_yscale("log")
            above.set_ylim(top=min(10.0, above.get_ylim()[1]))
            below.set_ylim(lowest, min(1.0, below.get_ylim()[1]))
        for axis in axes[-1]:
            axis.set_xlabel("communication rounds")
        columns[0][0].set_ylabel("training loss")
        columns[0][1].set_ylabel("test accuracy")
        legend_above(figure, columns[0][0], int(wide * shape[1] // 2))
    return figure


def alphas(rows: Rows) -> dict[str, dict[str, float]]:
    """Final mixing weights over clients and seeds, by label.

    A client whose model diverged counts as lost.
    """
    return {
        label: {
            "mean": float(np.nanmean(row.alphas)),
            "lowest": float(np.nanmin(row.alphas)),
            "highest": float(np.nanmax(row.alphas)),
            "lost": int(np.isnan(row.alphas).sum()),
        }
        for label, row in rows.items()
        if row.alphas.size
    }


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Spearman's rank correlation, with mean ranks for ties; 0 for constant values."""
    ranks = [
        ((x[:, None] > x[None]).sum(1) + (x[:, None] >= x[None]).sum(1)) / 2
        for x in (left, right)
    ]
    if min(rank.std() for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])

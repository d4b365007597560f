# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's figures: accuracy against rounds, and against alpha."""

from typing import Any

import numpy as np

from fedblend_reproductions.flix.network_task import ALPHAS
from fedblend_reproductions.plots import banded, legend_above, panels

LEVELS = {"FedAvg, fine-tuned": "--", "alone": ":"}
SHADE = "0.35"


def curves(rows: dict[str, Any]) -> Any:
    """Test accuracy over the rounds; what has none of its own is a line across."""
    with panels(1, 1, width=5.5, height=3.4) as (figure, axes):
        ax = axes[0, 0]
        for name, row in rows.items():
            if name in LEVELS:
                style = {"color": SHADE, "linestyle": LEVELS[name]}
                ax.axhline(row.test, label=name, **style)
            else:
                tests = [score.test for score in row.scores]
                banded(ax, row.scores[0].rounds, tests, label=name)
        ax.set(xlabel="communication rounds", ylabel="test accuracy")
        legend_above(figure, ax, most=2)
    return figure


def by_alpha(outcome: Any, paper: dict[float, float]) -> Any:
    """Accuracy for each alpha: tried on validation rows, at the end, the paper's."""
    solvers = {setting.solver for setting in outcome.flix}
    places = [*ALPHAS, 1.0]
    with panels(1, 3, width=3.2, height=3.4) as (figure, (axes,)):
        tried, ended, theirs = axes
        for number, solver in enumerate(sorted(solvers)):
            mine = {
                alpha: [
                    value
                    for one, value in outcome.trial.items()
                    if one.solver == solver and one.alpha == alpha
                ]
                for alpha in places
            }
            style = {"color": f"C{number}", "marker": "o", "markersize": 4}
            best = [max(values) for values in mine.values()]
            tried.plot(places, best, label=solver, **style)
            ran = [*outcome.flix.items(), *outcome.shared.items()]
            # Of several with one alpha the last stays: the best on validation rows.
            rows = {
                setting.alpha: row
                for setting, row in sorted(ran, key=lambda one: one[1].validation)
                if setting.solver == solver
            }
            across = sorted(rows)
            tests = np.array(
                [[score.test[-1] for score in rows[alpha].scores] for alpha in across]
            )
            banded(ended, across, tests.T, label=solver, **style)
        theirs.plot(ALPHAS, [paper[alpha] for alpha in ALPHAS], "ko-", markersize=4)
        theirs.axhline(paper[1.0], color=SHADE)
        tried.set(title="validation, trial", ylabel="accuracy")
        ended.set(title="test, to the end")
        theirs.set(title="the paper's Table 1")
        for ax in axes:
            ax.set(xlabel="alpha, the weight of the shared model", xticks=places)
        legend_above(figure, tried, most=3)
    return figure

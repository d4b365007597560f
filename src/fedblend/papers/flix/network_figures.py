# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's figures: accuracy against rounds, and against alpha."""

from typing import Any

import numpy as np

from fedblend.papers.drawing import banded, legend_above, panels
from fedblend.papers.flix.network_task import ALPHAS

COLOURS = {"barely": "C0", "well": "C1", "stepping": "C4", "fedavg": "C2"}
LEVELS = {"finetuned": ("FedAvg, fine-tuned", "--"), "alone": ("local models", ":")}
SHADE = "0.35"


def curves(outcome: Any, name: str, alpha: float) -> Any:
    """Test accuracy over the rounds: FLIX at its best, and FedAvg."""
    label = f"FLIX, alpha {alpha:g}, x_i {name} trained"
    lines = {
        name: (label, outcome.flix[name][alpha]),
        "fedavg": ("FedAvg", outcome.fedavg),
    }
    with panels(1, 1, width=5.5, height=3.4) as (figure, axes):
        for kind, (label, one) in lines.items():
            tests = [score.test for score in one.scores]
            rounds = one.scores[0].rounds
            banded(axes[0, 0], rounds, tests, label=label, color=COLOURS[kind])
        _levels(axes[0, 0], outcome)
        axes[0, 0].set(xlabel="communication rounds", ylabel="test accuracy")
        legend_above(figure, axes[0, 0], most=2)
    return figure


def by_alpha(outcome: Any, paper: dict[float, float]) -> Any:
    """Test accuracy for each alpha beside what does not depend on it; the paper's."""
    groups = {
        "barely": ("FLIX, x_i barely trained", outcome.flix["barely"]),
        "well": ("FLIX, x_i well trained", outcome.flix["well"]),
    }
    if outcome.stepping:
        groups["stepping"] = ("FLIX with local steps", outcome.stepping)
    with panels(1, 2, width=4.0, height=3.4) as (figure, axes):
        ours, theirs = axes[0]
        for kind, (label, flix) in groups.items():
            tests = np.array(
                [[score.test[-1] for score in flix[alpha].scores] for alpha in ALPHAS]
            )
            style = {"color": COLOURS[kind], "marker": "o", "markersize": 4}
            banded(ours, ALPHAS, tests.T, label=label, **style)
        ours.axhline(outcome.fedavg.test, color=COLOURS["fedavg"], label="FedAvg")
        _levels(ours, outcome)
        accuracies = [paper[alpha] for alpha in ALPHAS]
        theirs.plot(ALPHAS, accuracies, "o-", color=COLOURS["barely"], markersize=4)
        theirs.axhline(paper[1.0], color=COLOURS["fedavg"])
        ours.set(title="here", ylabel="test accuracy")
        theirs.set(title="in the paper's Table 1")
        for ax in axes[0]:
            ax.set(xlabel="alpha, the weight of the shared model", xticks=ALPHAS)
        legend_above(figure, ours, most=3)
    return figure


def _levels(axes: Any, outcome: Any) -> None:
    """What has no rounds of its own, as lines across."""
    for field, (label, style) in LEVELS.items():
        level = getattr(outcome, field).test
        axes.axhline(level, color=SHADE, linestyle=style, label=label)

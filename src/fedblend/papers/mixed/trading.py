# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M8: more steps of a smaller rate, as in Figure 9."""

import numpy as np

from fedblend.papers.claims import Claim, Finding, Verdict
from fedblend.papers.mixed import smiles
from fedblend.papers.mixed.figures import by_way
from fedblend.papers.mixed.task import course, way

WAYS = ("parallel", "one_way", "two_way")


def check(quick: bool) -> Finding:
    """Rate times steps held, test loss in the mean over rounds."""
    this = smiles.task(quick)
    stretch = 0.08 if quick else 6 * smiles.RATE
    numbers = (1, 4) if quick else (1, 2, 4, 8)
    ways = WAYS[1:2] if quick else WAYS
    seeds, rounds, points = (2, 40, 4) if quick else (5, 150, 15)
    found = {
        how: {
            steps: course(
                this,
                way(this._replace(steps=steps), how),
                rates=[stretch / steps] * seeds,
                seeds=range(seeds),
                rounds=rounds,
                every=rounds // points,
            )
            for steps in numbers
        }
        for how in ways
    }
    losses = {
        how: np.array([curves.values["loss"].mean(axis=1) for curves in of.values()])
        for how, of in found.items()
    }
    gains = {how: _gains(those) for how, those in losses.items()}
    steps_up = np.concatenate(list(gains.values()))
    hurt = int((steps_up[:, 0] < -2 * steps_up[:, 1]).sum())
    helped = int((steps_up[:, 0] > 2 * steps_up[:, 1]).sum())
    verdict = Verdict.differs if hurt > helped else Verdict.partly
    return Finding(
        verdict=Verdict.reproduced if not hurt and helped else verdict,
        ours=f"Of {len(steps_up)} times that steps are doubled and the rate halved, "
        f"{helped} help and {hurt} hurt by more than two standard errors. Test loss in "
        f"the mean over {rounds} rounds with {', '.join(map(str, numbers))} steps: "
        + "; ".join(
            f"{how} {', '.join(f'{loss:.3f}' for loss in those.mean(axis=1))}"
            for how, those in losses.items()
        )
        + ".",
        numbers={
            "steps": numbers,
            "stretch": stretch,
            "rounds": found[ways[0]][numbers[0]].rounds,
            "curves": {
                how: {steps: curves.values for steps, curves in of.items()}
                for how, of in found.items()
            },
            "losses": losses,
            "gains": gains,
            "hurt": hurt,
            "helped": helped,
        },
        figures={"steps": by_way(found, "steps a round: {}", 1.2)},
        why="Criterion: no doubling of the steps at half the rate hurts, by two "
        "standard errors over seeds, and some help. Rate times steps is "
        f"{stretch / this.weights[0]:g} by the paper's count, three times that of its "
        "Table 5, where steps matter more; central batches grow with the steps under "
        f"one_way, by the paper's rule. {seeds} seeds; bands are 95 % confidence of "
        f"the mean. {smiles.DATA}",
    )


def _gains(losses: np.ndarray) -> np.ndarray:
    """What each increase of the steps gains, and its standard error over seeds."""
    gains = losses[:-1] - losses[1:]
    error = gains.std(axis=1, ddof=1) / np.sqrt(gains.shape[1])
    return np.stack([gains.mean(axis=1), error], axis=1)


M8 = Claim(
    "M8",
    "more steps of a smaller rate",
    "With rate times steps held, more steps never hurt convergence and often help "
    "(appendix B.4.2, Figure 9).",
    check,
)

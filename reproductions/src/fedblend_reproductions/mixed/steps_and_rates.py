# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M8: more steps of a smaller rate, as in Figures 9 and 10."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.mixed import earlier_verdicts, faces, text
from fedblend_reproductions.mixed.figures import confident, focus
from fedblend_reproductions.mixed.task import (
    ALGORITHMS,
    Curves,
    How,
    Task,
    course,
    mixed_fl,
)
from fedblend_reproductions.plots import panels, shades

CRITERION = (
    "no doubling of the steps at half the rate hurts, by two standard errors of the "
    "test loss in the mean over rounds, over pairs of seeds, and some help, on both "
    "tasks together; not reproduced if more hurt than help, else partly. Rate times "
    "steps is the paper's"
)
FACES, TEXT = "faces", "text"
CHANCE = 0.038
"""That ten seeds (Student's, 9 degrees of freedom) are two standard errors below."""


class Setting(NamedTuple):
    """Rate times steps of each algorithm (by the paper's count), the steps that are
    tried, and how long.
    """

    step_sum: dict[How, float]
    steps: tuple[int, ...]
    rounds: int
    points: int
    seeds: int


SETTINGS = {
    FACES: Setting(dict.fromkeys(ALGORITHMS, 0.02), (1, 2, 4, 8), 300, 15, 10),
    TEXT: Setting(
        {"parallel": 32.0, "one_way": 32.0, "two_way": 16.0},
        (4, 8, 16, 32),
        150,
        15,
        10,
    ),
}
"""By Tables 5 and 7."""
QUICK = {FACES: Setting({"one_way": 0.16}, (1, 4), 40, 4, 2)}


def task(name: str, quick: bool) -> Task:
    """Faces, or text with the paper's batches."""
    return faces.task(quick) if name == FACES else text.task(text.PAPER_STEPS)


def found(
    folder: Path, name: str, this: Task, setting: Setting, algorithms: Sequence[How]
) -> dict[str, dict[int, Curves]]:
    """Loss curves by algorithm and steps, from the cache where they are there."""
    cache = Cache(
        folder,
        {
            **setting._asdict(),
            "task": name,
            "round": (this.cohort, this.batch_size),
            "counts": this.federated_data.train.counts,
        },
    )

    def run(how: How, steps: int) -> Curves:
        of = this._replace(steps=steps)
        batch = of.central_batch(how)
        if name == TEXT:
            batch = text.central_batch(of, text.PAPER_STEPS, how)
        rate = this.weights[0] * setting.step_sum[how] / steps
        return course(
            of,
            mixed_fl(of, how, central_batch=batch),
            rates=[rate] * setting.seeds,
            seeds=range(1, setting.seeds + 1),
            rounds=setting.rounds,
            every=setting.rounds // setting.points,
        )

    return {
        how: {
            steps: text.curves(
                cache,
                f"{name} {how} {steps}",
                lambda how=how, steps=steps: run(how, steps),
            )
            for steps in setting.steps
        }
        for how in algorithms
    }


def losses_of(name: str, curves: Curves) -> np.ndarray:
    """Test loss ``[seeds, points]``."""
    if name == FACES:
        return curves.values["loss"]
    return text.measured_on("both", curves.values, "loss")


def check(quick: bool, folder: Path) -> Finding:
    """Rate times steps held, test loss in the mean over rounds."""
    settings = QUICK if quick else SETTINGS
    ran, losses = {}, {}
    for name, setting in settings.items():
        algorithms = tuple(setting.step_sum)
        ran[name] = found(folder, name, task(name, quick), setting, algorithms)
        losses[name] = {
            how: np.nan_to_num(
                [losses_of(name, curves).mean(axis=1) for curves in of.values()],
                nan=np.inf,
            )
            for how, of in ran[name].items()
        }
    gains = {
        name: {how: _gains(those) for how, those in of.items()}
        for name, of in losses.items()
    }
    counts = {name: _counts(of) for name, of in gains.items()}
    helped, hurt = (sum(of[which] for of in counts.values()) for which in (0, 1))
    doublings = sum(len(those) for of in gains.values() for those in of.values())
    verdict = Verdict.differs if hurt > helped else Verdict.partly
    return Finding(
        verdict=Verdict.reproduced if not hurt and helped else verdict,
        ours="; ".join(
            f"{name}: of {sum(map(len, gains[name].values()))} times that steps are "
            f"doubled and the rate halved, {counts[name][0]} help and "
            f"{counts[name][1]} hurt by more than two standard errors. Test loss in "
            f"the mean over {settings[name].rounds} rounds with "
            f"{', '.join(map(str, settings[name].steps))} steps: "
            + "; ".join(
                f"{how} {', '.join(f'{loss:.3f}' for loss in those.mean(axis=1))}"
                for how, those in of.items()
            )
            for name, of in losses.items()
        )
        + ".",
        numbers={
            "settings": {name: one._asdict() for name, one in settings.items()},
            "rounds": {
                name: next(iter(next(iter(of.values())).values())).rounds
                for name, of in ran.items()
            },
            "curves": {
                name: {
                    how: {steps: curves.values for steps, curves in those.items()}
                    for how, those in of.items()
                }
                for name, of in ran.items()
            },
            "losses": losses,
            "gains": gains,
            "hurt": hurt,
            "helped": helped,
        },
        figures={"steps": _figure(ran)},
        why=f"Criterion: {CRITERION}: "
        + "; ".join(
            f"{name} {', '.join(f'{how} {x:g}' for how, x in one.step_sum.items())}"
            for name, one in settings.items()
        )
        + ". Central batches grow with the steps under one_way, by the paper's rule; "
        "two_way averages. "
        + ", ".join(f"{one.seeds} seeds ({name})" for name, one in settings.items())
        + "; bands are 95 % confidence of the mean. A run that is not a number counts "
        f"as infinite.{_diverged(ran)} Two standard errors are few: if no doubling did "
        f"anything, {doublings * CHANCE:.1f} of {doublings} would seem to hurt by "
        f"chance, and as many to help. {faces.DATA}"
        + (
            " " + text.described(task(TEXT, quick), text.PAPER_STEPS)
            if TEXT in settings
            else ""
        ),
        before={} if quick else earlier_verdicts.M8,
    )


def _gains(losses: np.ndarray) -> np.ndarray:
    """What each increase of the steps gains, and its standard error over seeds.

    Where fewer steps diverged in some seed, the gain is infinite, and sure.
    """
    with np.errstate(invalid="ignore"):
        gains = losses[:-1] - losses[1:]
        error = gains.std(axis=1, ddof=1) / np.sqrt(gains.shape[1])
        mean = gains.mean(axis=1)
    return np.stack([mean, np.where(np.isfinite(mean), error, 0)], axis=1)


def _diverged(ran: dict[str, dict[str, dict[int, Curves]]]) -> str:
    """Of which settings seeds ended with more loss than they began with, in words."""
    counts = {
        f"{name} {how} with {steps} steps": int((~(losses[:, -1] < losses[:, 0])).sum())
        for name, of in ran.items()
        for how, those in of.items()
        for steps, losses in ((at, losses_of(name, of)) for at, of in those.items())
    }
    listed = ", ".join(f"{where} {count}" for where, count in counts.items() if count)
    return (
        f" Seeds that ended with more loss than at the start: {listed}; where steps "
        "are doubled from there, what helps is that training is stable at all."
        if listed
        else ""
    )


def _counts(gains: dict[str, np.ndarray]) -> tuple[int, int]:
    """How many increases help and how many hurt."""
    of = np.concatenate(list(gains.values()))
    return int((of[:, 0] > 2 * of[:, 1]).sum()), int((of[:, 0] < -2 * of[:, 1]).sum())


def _figure(ran: dict[str, dict[str, dict[int, Curves]]]) -> Any:
    with panels(len(ran), len(ALGORITHMS), width=3.6) as (figure, axes):
        for row, (name, of) in enumerate(ran.items()):
            axes[row, 0].set_ylabel(f"loss, test rows, {name}")
            for column, (how, those) in enumerate(of.items()):
                here = axes[row, column]
                here.set_title(how)
                here.set_xlabel("rounds")
                for steps, color in zip(those, shades(len(those)), strict=True):
                    values = losses_of(name, those[steps])
                    style = {"color": color, "label": f"steps a round: {steps}"}
                    confident(here, those[steps].rounds, values, **style)
                focus(here, [losses_of(name, curves) for curves in those.values()])
            axes[row, 0].legend()
    return figure


def headline(numbers: Numbers) -> str:
    """How many doublings of the steps help and hurt."""
    gains = [those for of in numbers["gains"].values() for those in of.values()]
    return (
        f"Of {sum(map(len, gains))} doublings of the steps {numbers['helped']} help, "
        f"{numbers['hurt']} hurt"
    )


M8 = Claim(
    "M8",
    "More steps of a smaller rate",
    "With rate times steps held, more steps never hurt convergence and often help "
    "(appendix B.4.2, Figure 9 for faces and Figure 10 for text).",
    check,
    headline,
    "0 hurt",
    resumable=True,
)

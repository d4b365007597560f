# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A9: alpha by the generalization bound, beside other rules."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedblend_reproductions.apfl import tables
from fedblend_reproductions.apfl.bound_runs import (
    BOUNDS,
    CONSTANTS,
    GRID,
    OWN,
    RATE,
    of_draw,
    same_for_all,
)
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.plots import legend_above, panels

CLOSE = 0.005
"""Largest difference of test accuracies that count as equal."""


def check(quick: bool, folder: Path) -> Finding:
    """Rules for alpha compared on test rows of several partitions."""
    levels = (1.0,) if quick else (0.1, 1.0, 100.0)
    draws = range(1 if quick else 3)
    cache = Cache(folder, {"quick": quick, "grid": GRID, "constants": CONSTANTS})
    answers = {
        f"Dirichlet({level:g})": [
            cache(f"{level} draw {draw}", partial(of_draw, quick, level, draw))
            for draw in draws
        ]
        for level in levels
    }
    for level, those in zip(levels, answers.values(), strict=True):
        for draw, answer in zip(draws, those, strict=True):
            answer["same"] = cache(
                f"{level} draw {draw} same for all",
                partial(same_for_all, quick, level, draw, answer["alphas"]),
            )
    found = {name: _together(those) for name, those in answers.items()}
    best = _best_constant([answer for those in answers.values() for answer in those])
    gaps = {name: those["behind"][best] for name, those in found.items()}
    close = {name: gap >= -max(CLOSE, 2 * of) for name, (gap, of) in gaps.items()}
    beats = {
        name: those["accuracy"][best] > those["accuracy"]["fixed at 0.5"]
        for name, those in found.items()
    }
    own = {name: those["beyond_same"][best] for name, those in found.items()}
    tells = {name: gap > 2 * error for name, (gap, error) in own.items()}
    every = [*close.values(), *beats.values(), *tells.values()]
    verdict = Verdict.partly if any(every) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(every) else verdict,
        ours=f"With the best C ({best.partition('= ')[2]}) the formula's alphas give: "
        + "; ".join(
            f"{name}: {100 * those['accuracy'][best]:.2f} % (tuned on validation rows "
            f"{100 * those['accuracy'][OWN]:.2f}, 0.5 for all "
            f"{100 * those['accuracy']['fixed at 0.5']:.2f}, learned "
            f"{100 * those['accuracy']['learned']:.2f}); beyond their mean for all "
            f"{100 * own[name][0]:+.2f} (error {100 * own[name][1]:.2f}); "
            f"rank correlation with the tuned alphas {those['ranks'][best]:+.2f}, mean "
            "alpha by C " + ", ".join(f"{those['alpha'][rule]:.2f}" for rule in BOUNDS)
            for name, those in found.items()
        )
        + ".",
        numbers={
            "found": found,
            "as_good_as_tuned": close,
            "better_than_one_half": beats,
            "better_than_its_mean_for_all": tells,
            "draws": answers,
        },
        figures={"alphas": _figure(answers, best)},
        why="Criterion: with one C for all federations, the one that is best on "
        "validation rows, the formula's alphas are at most half a point or two "
        "standard errors over clients behind those that each client tunes on its "
        "validation rows, better than 0.5 for all, and better than their own mean for "
        "all by two standard errors; partly if some of it somewhere. The last "
        "condition was added when the first two held with alphas that hardly differ "
        "between clients: without it any alpha near their mean would do. C is one of "
        f"{', '.join(f'{constant:g}' for constant in CONSTANTS)}; as it grows, alpha "
        "tends to what the numbers of rows say. The "
        "formula sees training rows only: losses of the shared model and of those "
        "trained alone, label shares for the distance of distributions, d the number "
        "of parameters, B = log 10, and no lambda_H. C is not given by the theorem, "
        "which is about bounded losses, and cross entropy is none. 4000 rows of MNIST "
        "on 30 clients of unequal sizes, draws of all rows for each concentration: "
        f"{len(draws)}; 60 rounds of 10 steps of APFL at the rate {RATE}.",
        table=_table(found),
    )


def _best_constant(answers: list[Any]) -> str:
    """The rule whose C is best on validation rows."""

    def accuracy(rule: str) -> float:
        return float(np.mean([answer["validation"][rule] for answer in answers]))

    return max(BOUNDS, key=accuracy)


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of every rule over clients and draws, and its distance from ``OWN``."""
    rules = list(answers[0]["alphas"])

    def joined(part: str, rule: str) -> np.ndarray:
        return np.concatenate([np.array(a[part][rule], np.float64) for a in answers])

    tuned = joined("alphas", OWN)
    found: dict[str, Any] = {
        name: {} for name in ("accuracy", "alpha", "behind", "ranks", "beyond_same")
    }
    for rule in rules:
        accuracies = joined("accuracies", rule)
        found["accuracy"][rule] = float(np.nanmean(accuracies))
        found["alpha"][rule] = float(joined("alphas", rule).mean())
        found["behind"][rule] = _mean(accuracies - joined("accuracies", OWN))
        if rule in BOUNDS:
            found["beyond_same"][rule] = _mean(accuracies - joined("same", rule))
        found["ranks"][rule] = tables.rank_correlation(joined("alphas", rule), tuned)
    return found


def _mean(gaps: np.ndarray) -> tuple[float, float]:
    """The mean of the finite values, and its standard error."""
    gaps = gaps[np.isfinite(gaps)]
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))


def _table(found: dict[str, Any]) -> list[list[str]]:
    return [
        ["", "alpha by", "mean alpha", "test accuracy", "beyond tuned", "ranks"],
        *(
            [
                name,
                rule,
                f"{those['alpha'][rule]:.2f}",
                f"{100 * those['accuracy'][rule]:.2f}",
                f"{100 * behind[0]:+.2f} ± {100 * behind[1]:.2f}",
                f"{those['ranks'][rule]:+.2f}",
            ]
            for name, those in found.items()
            for rule, behind in those["behind"].items()
        ),
    ]


def _figure(answers: dict[str, Any], best: str) -> Any:
    with panels(1, len(answers), width=3.8, height=3.4) as (figure, (axes,)):
        for axis, (name, draws) in zip(axes, answers.items(), strict=True):
            for number, rule in enumerate([*BOUNDS, "learned"]):
                across = np.concatenate([those["alphas"][OWN] for those in draws])
                values = np.concatenate([those["alphas"][rule] for those in draws])
                # A little apart, as many clients choose the same of five.
                axis.scatter(
                    across + 0.04 * (number - 1.5),
                    values,
                    s=9,
                    color=f"C{number}",
                    label=f"{rule} (best C)" if rule == best else rule,
                )
            axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
            axis.set_title(name)
            axis.set_xlabel("alpha tuned on validation rows")
        axes[0].set_ylabel("alpha of the rule")
        legend_above(figure, axes[0])
    return figure


def headline(numbers: Numbers) -> str:
    """What the bound's alphas gain over their mean, at most, with the best C."""
    best = _best_constant([one for of in numbers["draws"].values() for one in of])
    gain = max(of["beyond_same"][best][0] for of in numbers["found"].values())
    return (
        f"The bound's alphas gain {100 * gain:.2f} points at most over their mean for "
        "all"
    )


A9 = Claim(
    "A9",
    "The bound's alpha",
    "The generalization bound gives the best mixing weight of each client in closed "
    "form, from losses, rows and the distance of distributions (Theorem 1); the paper "
    "says itself that the distance is not known, and learns alpha instead.",
    check,
    headline,
    resumable=True,
    undecided="the theorem leaves its constants open (C, lambda_H) and is about "
    "bounded losses, so no measurement can contradict it; whether its alphas tell "
    "clients apart would take several times the 90 clients of these draws to see",
)

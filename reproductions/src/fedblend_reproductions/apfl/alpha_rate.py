# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A11: the rate of alpha in equation (10), on the tasks of A3, A5 and A6."""

from pathlib import Path

import numpy as np

from fedblend_reproductions.apfl import (
    learned_alpha,
    methods,
    personal_methods,
    tables,
    writers,
)
from fedblend_reproductions.apfl.runs import Method, Row, Task, compare
from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, span

RATES = (0.001, 0.01, 0.1)
"""Rates of alpha alone."""
OURS, FIXED = "APFL, alpha learned", "APFL, alpha 0.75"
CRITERION = (
    "Criterion, fixed before the run: on every set (10) with the rate of the models is "
    "at most two standard errors over clients behind (10) with the rate of alpha's own "
    "that is best on validation rows; partly if on some."
)


def tried(start: float) -> tuple[Method, ...]:
    """Equation (10) at the models' rate and at slower ones, and a fixed alpha."""
    own = methods.own_rate(start)
    return (
        Method("apfl learned", methods.learned(start), {OURS: "personal"}),
        *(
            Method(
                f"apfl learned at {slow:g}",
                own,
                {f"{OURS} at {slow:g}": "personal"},
                lambda task, slow=slow: [(rate, slow) for rate in task.rates],
            )
            for slow in RATES
        ),
        methods.FIXED[-1],
    )


def tasks(quick: bool) -> dict[str, tuple[Task, float]]:
    """Tasks by name, with the first alpha of each."""
    femnist, test = writers.sets(quick)["femnist"]
    found = {"A5, femnist": (writers.task(quick, femnist, test), 0.5)}
    if quick:
        return found
    pairs = personal_methods.task(quick, personal_methods.random_pairs)
    synthetic = {
        f"A3, synthetic({level:g}, {level:g})": (
            learned_alpha.task(quick, level, by_class=False),
            learned_alpha.START,
        )
        for level in (0.0, 1.0)
    }
    return {"A6, MNIST": (pairs, 0.5), **found, **synthetic}


def finished(rows: tables.Rows) -> list[bool]:
    """For each seed, whether all methods end with less training loss than at first."""
    losses = np.array([row.curves["train"]["loss"] for row in rows.values()])
    return [bool(of.all()) for of in (losses[:, :, -1] < losses[:, :, 0]).T]


def of_seeds(rows: tables.Rows, these: list[bool]) -> dict[str, Row]:
    """The rows of some seeds, or of all seeds if none is left."""
    if not any(these):
        return dict(rows)
    return {
        label: row._replace(
            clients=row.clients[these],
            curves={
                split: {metric: values[these] for metric, values in of.items()}
                for split, of in row.curves.items()
            },
        )
        for label, row in rows.items()
    }


def _without_failed(
    name: str, rows: dict[str, Row], fine: list[bool], slower: str
) -> str:
    """The results without seeds that diverged, which count in the verdict."""
    some = of_seeds(rows, fine)
    rest = ", ".join(
        f"{label} {100 * np.nanmean(row.clients):.2f} %" for label, row in some.items()
    )
    gaps = (tables.beyond(some, OURS, slower), tables.beyond(some, slower, FIXED))
    behind, ahead = map(tables.points, gaps)
    return (
        f" {name}: {fine.count(False)} of {len(fine)} seeds diverged at a rate that "
        "had been chosen with another seed; all numbers above, and the verdict, have "
        f"it in them, the figure does not. Without it: {rest}; the models' rate less "
        f"the best of alpha's own {behind}, which less 0.75 for all {ahead}."
    )


def check(quick: bool, folder: Path) -> Finding:
    """Equation (10) with several rates of alpha's own."""
    groups: dict[str, dict[str, Row]] = {}
    for name, (this, start) in tasks(quick).items():
        cache = Cache(folder / name.replace(" ", "_"), this.settings())
        groups[name] = compare(this, tried(start), cache)
    slower = {
        name: tables.chosen(rows, [f"{OURS} at {slow:g}" for slow in RATES])
        for name, rows in groups.items()
    }
    gaps = {
        name: tables.beyond(rows, OURS, slower[name]) for name, rows in groups.items()
    }
    fixed = {
        name: tables.beyond(rows, slower[name], FIXED) for name, rows in groups.items()
    }
    fine = {name: finished(rows) for name, rows in groups.items()}
    held = [gap >= -2 * error for gap, error in gaps.values()]
    verdict = Verdict.partly if any(held) else Verdict.differs
    alphas = {name: tables.alphas(rows) for name, rows in groups.items()}
    return Finding(
        verdict=Verdict.reproduced if all(held) else verdict,
        ours="Test accuracy: "
        + "; ".join(
            f"{name}: "
            + ", ".join(
                f"{label} {100 * row.last.mean():.2f} %"
                + (
                    f" (alpha {alphas[name][label]['mean']:.2f})"
                    if OURS in label
                    else ""
                )
                for label, row in rows.items()
            )
            + "; the models' rate less the best of alpha's own "
            f"{tables.points(gaps[name])}, which less 0.75 for all "
            f"{tables.points(fixed[name])}"
            for name, rows in groups.items()
        )
        + ".",
        numbers={
            "models_rate_minus_slower": gaps,
            "slower_minus_fixed": fixed,
            "seeds_that_trained": fine,
            "alphas": alphas,
            "rows": {
                name: {label: row.numbers() for label, row in rows.items()}
                for name, rows in groups.items()
            },
        },
        figures={
            "rounds": tables.curves(
                {name: of_seeds(rows, fine[name]) for name, rows in groups.items()},
                None if quick else 0.8,
            )
        },
        criterion=CRITERION,
        why="The rate of alpha is a number that the paper does not tell apart from the "
        "models'; here it stays the same in all rounds. Tasks, rates of the models, "
        "seeds and how they are chosen are those of the claims named; alpha is the "
        "shared model's weight, and its mean over clients and seeds at the end is in "
        "brackets."
        + "".join(
            _without_failed(name, groups[name], of, slower[name])
            for name, of in fine.items()
            if not all(of)
        ),
        table=tables.grouped(groups),
    )


def headline(numbers: Numbers) -> str:
    """How far the models' rate is behind a rate of alpha's own."""
    behind = [-100 * gap for gap, _ in numbers["models_rate_minus_slower"].values()]
    points = span(behind, ".2f")
    return f"Alpha at the models' rate is {points} points behind a rate of its own"


A11 = Claim(
    "A11",
    "Alpha's own rate",
    "Equation (10) moves alpha by gradient descent with the rate of the models, and "
    "what it finds is as good as the best fixed alpha (section 4.2, Table 2).",
    check,
    headline,
    "as good",
    resumable=True,
)

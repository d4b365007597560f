# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M11: one source after the other forgets the first, as in Figure 13."""

from pathlib import Path
from typing import Any

import numpy as np

from fedblend_reproductions.cache import Cache
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict, span
from fedblend_reproductions.mixed import text
from fedblend_reproductions.mixed.figures import confident
from fedblend_reproductions.mixed.task import (
    Curves,
    Task,
    central_alone,
    clients_alone,
    course,
    curves_of,
    measured,
    mixed_fl,
)
from fedblend_reproductions.plots import legend_above, panels

LOST = 0.01
"""Accuracy that has to be lost for a source to count as forgotten."""
ORDERS = {"clients, then server": text.SIDES, "server, then clients": text.SIDES[::-1]}
PARALLEL = "parallel"


def courses(task: Task, size: text.Size, cache: Cache) -> dict[str, Curves]:
    """Both orders, and parallel training for as long as both parts."""
    alone = {"clients": clients_alone(task), "central": central_alone(task)}
    both = mixed_fl(task, PARALLEL)
    rates = {
        name: text.tuned(task, size, name, method, cache)
        for name, method in {**alone, PARALLEL: both}.items()
    }
    seeds = range(1, size.seeds + 1)
    rounds = size.rounds // 2
    every = rounds // (size.points // 2)

    def in_turn(sides: tuple[str, ...]) -> Curves:
        parts, starts = [], None
        for side in sides:
            run = measured(
                task,
                alone[side],
                [rates[side]] * size.seeds,
                seeds,
                starts=starts,
                rounds=rounds,
                every=every,
            )
            parts.append(curves_of(run, task))
            starts = run.shared
        first, second = parts
        return Curves(
            np.concatenate([first.rounds, rounds + second.rounds[1:]]),
            {
                name: np.concatenate([values, second.values[name][:, 1:]], axis=1)
                for name, values in first.values.items()
            },
        )

    def at_once() -> Curves:
        replicas = {"rates": [rates[PARALLEL]] * size.seeds, "seeds": seeds}
        return course(task, both, **replicas, rounds=2 * rounds, every=every)

    found = {
        name: text.curves(
            cache, name.replace(",", ""), lambda sides=sides: in_turn(sides)
        )
        for name, sides in ORDERS.items()
    }
    return {**found, PARALLEL: text.curves(cache, PARALLEL, at_once)}


def change(curves: Curves, side: str) -> tuple[float, float]:
    """Accuracy that a side's rows gain in the second half, and its error over seeds."""
    accuracies = text.measured_on(side, curves.values, "accuracy")
    return _mean_and_error(accuracies[:, -1] - accuracies[:, len(curves.rounds) // 2])


def check(quick: bool, folder: Path) -> Finding:
    """What is lost on the source that was learned first, in either order."""
    size = text.QUICK if quick else text.FULL
    this = text.task(size)
    found = courses(this, size, text.cache_in(folder, this, size))
    changes = {
        name: {side: change(of, side) for side in text.SIDES}
        for name, of in found.items()
    }
    ends = {
        name: text.measured_on("both", of.values, "accuracy")[:, -1]
        for name, of in found.items()
    }
    beyond = {name: _mean_and_error(ends[PARALLEL] - ends[name]) for name in ORDERS}
    holds = {
        **{
            f"{name}: forgets the first": _surely(changes[name][sides[0]], LOST, -1)
            for name, sides in ORDERS.items()
        },
        "parallel training loses neither": all(
            mean > -LOST for mean, _ in changes[PARALLEL].values()
        ),
        **{
            f"parallel training is better on both than {name}": _surely(gap, 0, 1)
            for name, gap in beyond.items()
        },
    }
    verdict = Verdict.partly if any(holds.values()) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(holds.values()) else verdict,
        ours="Points of accuracy gained after the switch on posts / articles: "
        + "; ".join(
            f"{name} {100 * of['clients'][0]:+.1f} / {100 * of['central'][0]:+.1f}"
            for name, of in changes.items()
        )
        + ". In the end, on both together: "
        + ", ".join(f"{name} {values.mean():.3f}" for name, values in ends.items())
        + ".",
        numbers={
            "rounds": found[PARALLEL].rounds,
            "curves": {name: of.values for name, of in found.items()},
            "gained_after_switch": changes,
            "both_last": ends,
            "parallel_beyond": beyond,
            "holds": holds,
        },
        figures={"rounds": _figure(found)},
        why=f"Criterion: in either order at least {100 * LOST:g} point is lost on the "
        "source that was learned first, parallel training loses as much on neither "
        "after the same round, and ends better on both together (75 % posts, 25 % "
        "articles); all by two standard errors over seeds; partly if some: "
        + "; ".join(
            f"{name}: {'yes' if held else 'no'}" for name, held in holds.items()
        )
        + f". The switch is after {size.rounds // 2} rounds, the paper's after 250; "
        "the second part goes on from the model that each seed has reached. Rates are "
        f"tuned for either side alone and for parallel training as in M4; {size.seeds} "
        f"seeds, bands are 95 % confidence of the mean. " + text.described(this, size),
    )


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _surely(value: tuple[float, float], least: float, sign: int) -> bool:
    """Whether it is so large in this direction, and beyond two standard errors."""
    mean, error = sign * value[0], value[1]
    return bool(mean >= least and mean > 2 * error)


def _figure(found: dict[str, Curves]) -> Any:
    with panels(1, len(text.TITLES), width=3.8, height=3) as (figure, axes):
        for column, (source, title) in enumerate(text.TITLES.items()):
            here = axes[0, column]
            here.set_title(title)
            here.set_xlabel("rounds")
            for number, (name, of) in enumerate(found.items()):
                values = text.measured_on(source, of.values, "accuracy")
                confident(
                    here,
                    of.rounds[1:],
                    values[:, 1:],
                    color=f"C{number}",
                    label=name,
                    linestyle="-" if name == PARALLEL else "--",
                )
            here.axvline(found[PARALLEL].rounds[-1] / 2, color="0.7", linewidth=1)
        axes[0, 0].set_ylabel("accuracy, test rows")
        legend_above(figure, axes[0, 0])
    return figure


def headline(numbers: Numbers) -> str:
    """What is lost of the first source after the switch."""
    found = numbers["gained_after_switch"]
    lost = [-100 * found[name][sides[0]][0] for name, sides in ORDERS.items()]
    return f"After the switch {span(lost, '.1f')} points are lost on the first source"


M11 = Claim(
    "M11",
    "One source after the other",
    "Transfer learning forgets: after the switch from one source to the other, in "
    "either order, accuracy on the first source drops at once, while parallel training "
    "keeps both and ends with a better accuracy on the two together (Figure 13).",
    check,
    headline,
    resumable=True,
)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M9: which algorithm diverges first as the rate grows, with both merges of two_way.

On the language task, with the paper's weights, steps and batches: the character model,
and a table of pairs of characters, whose loss is convex.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend_reproductions.cache import available
from fedblend_reproductions.claims import Claim, Finding, Numbers, Verdict
from fedblend_reproductions.mixed import earlier_verdicts, text
from fedblend_reproductions.mixed.divergence_runs import (
    CHARACTERS,
    MERGES,
    QUICK,
    SIZES,
    VARIANTS,
    found,
    guess,
    limit,
)
from fedblend_reproductions.plots import legend_above, panels

CRITERION = (
    "reproduced if two_way that sums has a smaller limit than parallel and than "
    "one_way, on the character model; partly if on the table of pairs alone. If it has "
    "so on either and two_way that averages on neither, the authors' merge is taken to "
    "be a sum. An algorithm's limit is the last rate of the grid up to which, at it "
    "and at all below, the median seed has a mean test loss over the last half of the "
    "rounds (posts and articles in the mixture's weights) below that of a guess by the "
    "characters' frequencies"
)
PILOT = (
    "A pilot placed the grid before the criterion was committed: the table of pairs on "
    "a CPU, one seed, 24 rounds; at a rate of 32 two_way that sums ended at a loss of "
    "3.69 (a guess has 3.12), one_way at 2.56 and parallel at 2.57."
)


def check(quick: bool, folder: Path) -> Finding:
    """The largest rate up to which most seeds end below the loss of a guess."""
    sizes = QUICK if quick else SIZES
    names = ("one_way", "parallel", MERGES[1]) if quick else tuple(VARIANTS)
    losses, limits, guesses = {}, {}, {}
    this = None
    for model, size in sizes.items():
        this = text.task(size)
        guesses[model] = guess(this)
        losses[model] = available(
            names,
            lambda name, model=model, this=this, size=size: found(
                folder, model, this, size, [name]
            )[name],
        )
        limits[model] = {
            name: limit(size.rates, those, guesses[model])
            for name, those in losses[model].items()
        }
    assert this is not None
    first = {
        model: {
            name: of[name] < min(of["parallel"], of["one_way"])
            for name in MERGES
            if name in of
        }
        for model, of in limits.items()
        if {"parallel", "one_way", MERGES[1]} <= set(of)
    }
    sums = {model: of[MERGES[1]] for model, of in first.items()}
    averages = any(of.get(MERGES[0], False) for of in first.values())
    missing = {
        model: [name for name in names if name not in of]
        for model, of in limits.items()
    }
    lacking = "; ".join(
        f"the {model} ran for {', '.join(limits[model]) or 'no algorithm'} only"
        for model, those in missing.items()
        if those
    )
    size = next(iter(sizes.values()))
    return Finding(
        verdict=verdict_of(sums, sizes),
        ours=(f"Not decided{_at_least(sums)}: {lacking}. " if lacking else "")
        + "Largest rates, by the paper's count, up to which most seeds end with less "
        "loss than a guess: "
        + "; ".join(
            f"{model}: "
            + ", ".join(
                f"{name} {of[name] / text.WEIGHTS[0]:.3g}"
                for name in sorted(of, key=of.__getitem__)
            )
            for model, of in limits.items()
        )
        + ". The first to diverge: "
        + "; ".join(
            f"{model}: "
            + ", ".join(f"{name}: {'yes' if so else 'no'}" for name, so in of.items())
            for model, of in first.items()
        )
        + ". The authors' merge is "
        + (
            "taken to be a sum."
            if any(sums.values()) and not averages and not lacking
            else "open."
        ),
        numbers={
            "rates": {model: size.rates for model, size in sizes.items()},
            "losses": losses,
            "limits": limits,
            "guess": guesses,
            "two_way_first": first,
            "not_measured": missing,
        },
        figures={"rates": _figure(sizes, losses, guesses)},
        why=f"Criterion: {CRITERION}. The grid has "
        + " and ".join(
            f"{len(one.rates)} rates from {one.rates[0] / text.WEIGHTS[0]:g} to "
            f"{one.rates[-1] / text.WEIGHTS[0]:.3g} ({model})"
            for model, one in sizes.items()
        )
        + f", a factor of 1.41 apart; {size.rounds} rounds, {size.seeds} seeds. A rate "
        "that is the last of the grid is a lower bound. "
        + "".join(
            _beyond_the_first(model, sizes[model].rates, of, guesses[model])
            for model, of in losses.items()
        )
        + "The paper has, for its "
        "language task, two_way diverge beyond 1, parallel between 3 and 5, and "
        "one_way converge at 5 (appendix B.4.3), with clipping, and does not say how "
        "it merges: a sum steps twice as far as an average, since either side descends "
        f"the whole loss. {PILOT} {text.described(this, size)}",
        before={} if quick else earlier_verdicts.M9,
    )


def _beyond_the_first(
    model: str, rates: Sequence[float], losses: dict[str, np.ndarray], most: float
) -> str:
    """How many seeds end below ``most`` at the rate after the smallest limit."""
    least = min(limit(rates, those, most) for those in losses.values())
    after = [place for place, rate in enumerate(rates) if rate > least][:1]
    return "".join(
        f"At {rates[place] / text.WEIGHTS[0]:.3g}, the first rate beyond a limit "
        f"({model}), seeds that end below a guess: "
        + ", ".join(f"{name} {(of[place] < most).sum()}" for name, of in losses.items())
        + ". "
        for place in after
    )


def _at_least(sums: dict[str, bool]) -> str:
    """What one model alone leaves open."""
    return " between partly and wholly reproduced" if any(sums.values()) else ""


def verdict_of(sums: dict[str, bool], sizes: Iterable[str]) -> Verdict:
    """By the models on which it is known whether two_way that sums is the first."""
    if any(model not in sums for model in sizes):
        return Verdict.open
    if sums.get(CHARACTERS):
        return Verdict.reproduced
    return Verdict.partly if any(sums.values()) else Verdict.differs


def _figure(
    sizes: dict[str, text.Size],
    losses: dict[str, dict[str, np.ndarray]],
    guesses: dict[str, float],
) -> Any:
    with panels(1, len(sizes), width=4.6, height=3.2) as (figure, axes):
        for column, (model, size) in enumerate(sizes.items()):
            here = axes[0, column]
            rates = np.array(size.rates) / text.WEIGHTS[0]
            for name, those in losses[model].items():
                number = list(VARIANTS).index(name)
                style = {"color": f"C{number}", "marker": "osv^"[number]}
                # What diverged is drawn at the upper edge; the median is what counts.
                shown = np.minimum(those, 20)
                here.plot(rates, np.median(shown, axis=1), label=name, **style)
                band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
                here.fill_between(rates, shown.min(axis=1), shown.max(axis=1), **band)
            here.axhline(guesses[model], color="0.4", linestyle=":", label="a guess")
            here.set_xscale("log")
            here.set_yscale("log")
            here.set_title(model)
            here.set_xlabel("rate, by the paper's count")
        axes[0, 0].set_ylabel("test loss at the end, median seed")
        legend_above(figure, axes[0, -1])
    return figure


def headline(numbers: Numbers) -> str:
    """The largest rates at which two_way that sums and the others converge."""
    found = next(iter(numbers["limits"].values()))
    limits = {name: rate / text.WEIGHTS[0] for name, rate in found.items()}
    ours = limits.pop("two_way, summed", math.nan)
    others = min(limits.values(), default=math.nan)
    return (
        f"Two-way transfer that sums converges up to a rate of {ours:.3g}, the others "
        f"to {others:.3g}"
    )


M9 = Claim(
    "M9",
    "Which algorithm diverges first",
    "As the rate grows, two-way transfer is the first of the three to diverge "
    "(appendix B.2); on the language task, with 16 steps, beyond a rate of 1, while "
    "parallel training still converges at 3 and one-way transfer at 5 (B.4.3).",
    check,
    headline,
    "1, the others 3",
    resumable=True,
)

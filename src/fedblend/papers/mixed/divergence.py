# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M9: which way diverges first as the rate grows, with both merges of two_way."""

from typing import Any

import numpy as np

from fedblend.papers.claims import Claim, Finding, Verdict
from fedblend.papers.drawing import banded, panels
from fedblend.papers.mixed import smiles
from fedblend.papers.mixed.task import Curves, course, way

VARIANTS = {
    "parallel": ("parallel", None),
    "one_way": ("one_way", None),
    "two_way, averaged": ("two_way", "average"),
    "two_way, summed": ("two_way", "sum"),
}
WINDOW = 0.5
"""The last part of a run whose losses are looked at."""


def check(quick: bool) -> Finding:
    """The largest rate up to which most seeds end below the loss of a guess."""
    this = smiles.task(quick)
    rates = np.array([0.02, 0.24, 5]) if quick else 0.02 * 2.0 ** (np.arange(11) / 2)
    seeds, rounds, points = (3, 40, 8) if quick else (5, 120, 12)
    lanes = {
        "rates": np.repeat(rates, seeds).tolist(),
        "seeds": list(range(seeds)) * len(rates),
    }
    names = ("one_way", "two_way, summed") if quick else tuple(VARIANTS)
    found = {
        name: _ends(
            course(
                *(this, way(this, how, merge=merge)),
                **lanes,
                rounds=rounds,
                every=rounds // points,
            ),
            seeds,
        )
        for name, (how, merge) in ((name, VARIANTS[name]) for name in names)
    }
    # Chance on two equal halves; a run that diverges is far above it, or is stuck.
    stable = {
        name: np.median(losses, axis=1) < np.log(2) for name, losses in found.items()
    }
    limits = {
        name: float(max(rates[: len(ok) if ok.all() else ok.argmin()], default=0.0))
        for name, ok in stable.items()
    }
    order = sorted(limits, key=lambda name: limits[name])
    others = [limits[name] for name in names if not name.startswith("two_way")]
    first = {
        name: limits[name] < min(others) for name in names if name.startswith("two_way")
    }
    verdict = Verdict.partly if any(first.values()) else Verdict.differs
    return Finding(
        verdict=Verdict.reproduced if all(first.values()) else verdict,
        ours="Largest rates, by the paper's count, up to which most seeds end with "
        "less loss than a guess: "
        + ", ".join(f"{name} {limits[name] / this.weights[0]:.2g}" for name in order)
        + ". The first of the three to diverge: "
        + ", ".join(f"{name}: {'yes' if so else 'no'}" for name, so in first.items())
        + ".",
        numbers={
            "rates": rates,
            "losses": found,
            "limits": limits,
            "two_way_first": first,
        },
        figures={"rates": _figure(rates / this.weights[0], found)},
        why="Criterion: two_way has a smaller limit than either other way with both "
        "merges; partly if with one. The limit is the last of "
        f"{len(rates)} rates, a factor of {rates[1] / rates[0]:.2g} apart, up to which "
        "the median seed has a mean test loss below log 2 over the last half of "
        f"{rounds} rounds; {seeds} seeds. The paper says it of all its tasks, and does "
        "not tell how it merges: a sum steps twice as far as an average, since either "
        f"side descends the whole loss. {smiles.DATA}",
    )


def _ends(curves: Curves, seeds: int) -> np.ndarray:
    """Loss at the end, ``[rates, seeds]``; infinite where it is not a number."""
    losses = curves.values["loss"]
    last = losses[:, -max(int(WINDOW * losses.shape[1]), 1) :].mean(axis=1)
    return np.nan_to_num(last, nan=np.inf).reshape(-1, seeds)


def _figure(rates: np.ndarray, found: dict[str, np.ndarray]) -> Any:
    with panels(1, 1, width=5.0, height=3.2) as (figure, axes):
        here = axes[0, 0]
        for number, (name, losses) in enumerate(found.items()):
            style = {"color": f"C{number}", "marker": "osv^"[number], "markersize": 4}
            # What diverged is drawn at the upper edge.
            banded(here, rates, np.minimum(losses.T, 10), label=name, **style)
        here.axhline(np.log(2), color="0.4", linestyle=":", label="a guess")
        here.set_xscale("log")
        here.set_yscale("log")
        here.set_xlabel("rate, by the paper's count")
        here.set_ylabel("test loss at the end")
        here.legend()
    return figure


M9 = Claim(
    "M9",
    "which way diverges first",
    "As the rate grows, two-way transfer is the first of the three to diverge "
    "(appendix B.2).",
    check,
)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M9's runs: losses at the end over a grid of rates, and the largest stable rate."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedblend_reproductions.mixed import text
from fedblend_reproductions.mixed.task import Curves, How, Task, course, mixed_fl

VARIANTS: dict[str, tuple[How, str | None]] = {
    "parallel": ("parallel", None),
    "one_way": ("one_way", None),
    "two_way, averaged": ("two_way", "average"),
    "two_way, summed": ("two_way", "sum"),
}
MERGES = ("two_way, averaged", "two_way, summed")
WINDOW = 0.5
"""The last part of a run whose losses are looked at."""
CHARACTERS, PAIRS = "character model", "table of pairs"


def _rates(first: float, count: int) -> tuple[float, ...]:
    """The paper's rates, a factor of the root of two apart, as those of clients."""
    return tuple(text.WEIGHTS[0] * first * 2.0 ** (np.arange(count) / 2))


SIZES = {
    CHARACTERS: text.PAPER_STEPS._replace(
        rates=_rates(0.5, 14), rounds=150, points=15, seeds=5
    ),
    PAIRS: text.PAPER_STEPS._replace(
        rates=_rates(1.0, 20), rounds=150, points=15, seeds=5, network=None
    ),
}
QUICK = {
    PAIRS: text.QUICK._replace(
        rates=(20.0, 2000.0), rounds=12, points=4, seeds=2, steps=8
    )
}


def found(
    folder: Path, model: str, this: Task, size: text.Size, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Losses at the end ``[rates, seeds]`` of variants, from the folder if it has them.

    A replica for each pair of a rate and a seed.
    """
    cache = text.cache_in(folder, this, size)
    replicas = {
        "rates": np.repeat(size.rates, size.seeds).tolist(),
        "seeds": list(range(1, size.seeds + 1)) * len(size.rates),
    }
    losses = this._replace(
        measures={
            name: this.measures[name] for name in (f"loss@{s}" for s in text.SIDES)
        }
    )

    def run(name: str) -> Curves:
        how, merge = VARIANTS[name]
        method = mixed_fl(
            this, how, central_batch=text.central_batch(this, size, how), merge=merge
        )
        every = size.rounds // size.points
        return course(losses, method, **replicas, rounds=size.rounds, every=every)

    curves = {
        name: text.curves(
            cache, f"{model} {name.replace(',', '')}", lambda name=name: run(name)
        )
        for name in names
    }
    return {name: ends(of, size.seeds) for name, of in curves.items()}


def ends(curves: Curves, seeds: int) -> np.ndarray:
    """Loss at the end, ``[rates, seeds]``; infinite where it is not a number."""
    losses = text.measured_on("both", curves.values, "loss")
    last = losses[:, -max(int(WINDOW * losses.shape[1]), 1) :].mean(axis=1)
    return np.nan_to_num(last, nan=np.inf).reshape(-1, seeds)


def guess(this: Task) -> float:
    """Loss on test rows of knowing each source's characters' frequencies alone."""
    assert this.federated_data.test is not None
    targets = this.federated_data.test.examples[1]
    half = len(targets) // sum("loss" in name for name in this.measures)

    def entropy(part: np.ndarray) -> float:
        counts = np.bincount(part[part >= 0])
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    sides = {
        f"loss@{side}": entropy(targets[place * half : (place + 1) * half])
        for place, side in enumerate(text.SIDES)
    }
    return float(text.measured_on("both", sides, "loss"))


def limit(rates: Sequence[float], losses: np.ndarray, most: float) -> float:
    """The last rate up to which the median seed ends below ``most``; 0 if none."""
    fine = np.median(losses, axis=1) < most
    count = len(fine) if fine.all() else int(fine.argmin())
    return float(max(rates[:count], default=0.0))

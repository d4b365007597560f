# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How long the movie recommender's methods run, and with which rate and lambda.

Both are chosen on validation users, by recall after a part of the rounds. The baseline
tries all pairs of them. All methods use its lambda, which is part of the objective;
every other method tries the rates with it.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedblend_reproductions.cache import Cache
from fedblend_reproductions.mixed import movies
from fedblend_reproductions.mixed.task import How, Method, Task


class Setting(NamedTuple):
    """How long methods run, and with how many seeds; the baseline with its own.

    ``rates``, and lambdas as ``strengths``, are tried for ``tuning`` rounds.
    """

    adaptive: bool
    rates: tuple[float, ...]
    strengths: tuple[float, ...]
    tuning: int
    rounds: int
    points: int
    seeds: int
    baseline_seeds: int


class Chosen(NamedTuple):
    """A method's rate and lambda, and the recall of all pairs that it has tried."""

    pair: tuple[float, float]
    tried: dict[tuple[float, float], float]


LONGER = tuple(factor * movies.RATE for factor in (4.0, 16.0, 64.0))
SETTINGS = {
    "Adam": Setting(True, (movies.RATE,), movies.STRENGTHS, 100, 300, 10, 5, 1),
    "plain": Setting(False, LONGER, movies.STRENGTHS[:3], 300, 600, 10, 1, 1),
}
QUICK = {"plain": Setting(False, (movies.RATE,), (1e-3,), 0, 4, 2, 2, 1)}
PAPER = {
    "Adam": Setting(True, (movies.RATE,), movies.STRENGTHS, 300, 1000, 10, 5, 5),
    "plain": Setting(False, (movies.RATE,), movies.STRENGTHS, 1000, 2000, 10, 5, 5),
}
"""With the paper's rates, and as long as in Figure 6."""
BASELINE = "baseline"
TRIED = 100
"""The seed with which settings are tried."""


def cache_in(folder: Path, of: Task, setting: Setting) -> Cache:
    """The cache of results, whose settings are these."""
    rows = of.federated_data.train.total
    return Cache(
        folder, {**setting._asdict(), "server_rate": movies.SERVER_RATE, "rows": rows}
    )


def methods(of: Task, setting: Setting, algorithms: Sequence[How]) -> dict[str, Method]:
    """The baseline, these algorithms, and clients alone."""
    return {
        BASELINE: movies.baseline(of, setting.adaptive),
        **{how: movies.mixed_fl(of, how, setting.adaptive) for how in algorithms},
        "clients alone": movies.alone(of, setting.adaptive),
    }


def choose(
    of: Task, setting: Setting, these: Mapping[str, Method], cache: Cache
) -> dict[str, Chosen]:
    """The rate and lambda of each method."""

    def best(label: str, pairs: list[tuple[float, float]]) -> Chosen:
        if len(pairs) == 1:
            return Chosen(pairs[0], {})
        found = cache(
            f"{label} tried",
            lambda: movies.followed(
                of,
                these[label],
                pairs,
                [TRIED] * len(pairs),
                rounds=setting.tuning,
                every=setting.tuning,
                split="validation",
            ),
        )
        # A run that diverged has no recall, and is the worst.
        recall = [replica[-1] or 0.0 for replica in found["recall@10"]]
        return Chosen(
            pairs[int(np.argmax(recall))], dict(zip(pairs, recall, strict=True))
        )

    first = best(BASELINE, list(product(setting.rates, setting.strengths)))
    again = [(rate, first.pair[1]) for rate in setting.rates]
    others = {label: best(label, again) for label in these if label != BASELINE}
    return {BASELINE: first, **others}


def followed(
    of: Task,
    setting: Setting,
    these: Mapping[str, Method],
    chosen: Mapping[str, Chosen],
    cache: Cache,
) -> dict[str, Any]:
    """Every method's curves and bytes, with what it has chosen."""
    seeds = dict.fromkeys(these, setting.seeds)
    seeds[BASELINE] = setting.baseline_seeds
    return {
        label: cache(
            label,
            lambda method=method, label=label: movies.followed(
                of,
                method,
                [chosen[label].pair] * seeds[label],
                range(seeds[label]),
                rounds=setting.rounds,
                every=setting.rounds // setting.points,
            ),
        )
        for label, method in these.items()
    }

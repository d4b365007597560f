# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""M12's runs: Mixed FL over clipped clients, at several bounds and rates."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedblend as fb
from fedblend.transforms import central_loss
from fedblend.transforms.clip import clip_tree
from fedblend_reproductions.mixed import text
from fedblend_reproductions.mixed.task import (
    Curves,
    How,
    Method,
    Task,
    course,
    mixed_fl,
)

UNBOUNDED = 1e9
START, FOLLOW = 0.1, 0.2
"""The bound that follows the median begins here, and so fast, as its authors advise."""
CENTRAL = 0.2 / text.WEIGHTS[1]
"""The paper's 0.2 is of gradients that carry their weight w_c."""
FIXED = 1e-30
"""``adaptive_clip`` wants a rate above 0; with this one exp(-rate x) is exactly 1 in
float32, so that the bound stays where it is."""
BOUNDS = {
    "none": (UNBOUNDED, FIXED, UNBOUNDED),
    "median": (START, FOLLOW, CENTRAL),
    **{f"fixed {norm:g}": (norm, FIXED, CENTRAL) for norm in (0.1, 0.3, 1.0, 3.0)},
}
"""Of clients' answers at first, how fast it follows their median, and of the server's
gradients. The second is the paper's."""


class Size(NamedTuple):
    """A round on text, and for how long rates are tried with how many seeds.

    All bounds try the same rates of clients; ``round`` has the sizes of final runs.
    """

    round: text.Size
    tries: int
    trial_rounds: int


FULL = Size(
    text.PAPER_STEPS._replace(rates=(0.75, 1.5, 3.0, 6.0), rounds=200, points=20), 2, 60
)
QUICK = Size(
    text.QUICK._replace(rates=(5.0, 20.0), rounds=12, points=4, steps=2, seeds=2), 1, 6
)


class Clipped(NamedTuple):
    """A bound's rate, losses ``tried`` by rate, and curves on test rows at the rate."""

    rate: float
    tried: np.ndarray
    curves: Curves

    @property
    def loss(self) -> np.ndarray:
        """In the last half of the rounds, by seed."""
        losses = text.measured_on("both", self.curves.values, "loss")
        return losses[:, losses.shape[1] // 2 :].mean(axis=1)


def clipped(of: Task, how: How, batch: int) -> Method:
    """An algorithm over clipped clients, built from a rate and a row of ``BOUNDS``."""
    work = {"steps": of.steps, "batch_size": of.batch_size}
    gradient_of = central_loss.row_loss(of.loss, batch)

    def build(setting):
        rate, norm, follow, most = setting
        inner = fb.transforms.adaptive_clip(
            fb.fedavg(of.loss, fb.Work(rate, **work)), norm, rate=follow
        )

        def bounded(params, shard, key):
            return clip_tree(gradient_of(params, shard, key), most)[0]

        if how == "one_way":
            return fb.transforms.mixed_fl(inner, bounded, how=how, weights=of.weights)
        with warnings.catch_warnings():
            # That clipping on one side changes the mixture is what is measured here.
            warnings.simplefilter("ignore")
            return fb.transforms.mixed_fl(
                inner,
                bounded,
                how=how,
                weights=of.weights,
                steps=of.steps,
                optimizer=rate,
                upload=how == "two_way",
            )

    return mixed_fl(of, how)._replace(build=build)


def found(
    folder: Path, this: Task, size: Size, algorithms: Sequence[How]
) -> dict[str, dict[str, Clipped]]:
    """Every bound under these algorithms, from the folder where it has them."""
    cache = text.cache_in(folder, this, size.round, bounds=BOUNDS, tried=size[1:])
    rates, names = size.round.rates, list(BOUNDS)
    losses = this._replace(
        measures={
            name: this.measures[name] for name in (f"loss@{s}" for s in text.SIDES)
        }
    )

    def run(how: How, settings: list, seeds: range, rounds: int, every: int, **more):
        batch = text.central_batch(this, size.round, how)
        replicas: Any = [setting for setting in settings for _ in seeds]
        return course(
            losses,
            clipped(this, how, batch),
            rates=replicas,
            seeds=list(seeds) * len(settings),
            rounds=rounds,
            every=every,
            **more,
        )

    def one(how: How) -> dict[str, Clipped]:
        tried = text.curves(
            cache,
            f"{how} tried",
            lambda: run(
                how,
                [(rate, *BOUNDS[name]) for name in names for rate in rates],
                range(100, 100 + size.tries),
                size.trial_rounds,
                size.trial_rounds // 2,
                split="validation",
            ),
        )
        ends = text.measured_on("both", tried.values, "loss")[:, -1]
        ends = np.nan_to_num(ends, nan=np.inf).reshape(len(names), len(rates), -1)
        best = ends.mean(axis=2).argmin(axis=1)
        chosen = [
            (rates[place], *BOUNDS[name])
            for name, place in zip(names, best, strict=True)
        ]
        of, seeds = size.round, range(1, size.round.seeds + 1)
        curves = text.curves(
            cache,
            how,
            lambda: run(how, chosen, seeds, of.rounds, of.rounds // of.points),
        )
        return {
            name: Clipped(
                rates[best[place]],
                ends[place].mean(axis=1),
                Curves(
                    curves.rounds,
                    {
                        metric: values[place * of.seeds : (place + 1) * of.seeds]
                        for metric, values in curves.values.items()
                    },
                ),
            )
            for place, name in enumerate(names)
        }

    return {how: one(how) for how in algorithms}

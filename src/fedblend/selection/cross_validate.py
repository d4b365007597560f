# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Arms, cross-validated: what each costs on rows that its models did not see.

An arm is a way to get a model: a mixture at one alpha, another method, training alone.
Its models are trained K times without one fold of every client's rows, side by side as
replicas of one simulation, and once on all rows, to be deployed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, PyTree
from fedblend.data.federated import FederatedData
from fedblend.metrics import Metric
from fedblend.selection.tune_alpha import ALPHAS
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import RunSpec, set_up
from fedblend.simulation.train_alone import (
    of_best_length,
    prolonged,
    trying,
    without_others,
)

ALONE = "alone"
"""The arm of clients that train alone."""
Folds = Sequence[FederatedData]
Costs = list[np.ndarray]
"""Those of every client, row by row; less is better."""


class Arm(NamedTuple):
    """One way to get a model: its name, costs in the folds, and models of all rows."""

    name: str
    costs: Costs
    """On all rows that a fold held out."""
    run: Run
    replica: int | None = None
    """Which replica of the run it is."""
    crossed: Run | None = None
    """The run of models that lack a fold."""
    replicas: Sequence[int] = ()
    """Which replicas of that run they are, fold by fold."""

    def run_of(self, fold: int | None) -> Run:
        """The run that has the models of all rows, or those without a fold."""
        return self.run if fold is None or self.crossed is None else self.crossed

    def replica_of(self, fold: int | None) -> int | None:
        """Its place in that run."""
        return self.replica if fold is None else self.replicas[fold]

    def personal(self, client: int) -> PyTree:
        """The model of a client, trained on all its rows."""
        model = self.run.personal(client)
        return model if self.replica is None else trees.take(model, self.replica)

    def test(self, metric: str) -> np.ndarray:
        """The metric on every client's test rows."""
        measured = self.run.complete().measured[self.replica or 0]
        return np.asarray(measured["test"]["personal"][metric])


def by_alpha(spec: RunSpec, parts: Folds, metric: str, alphas: Any) -> list[Arm]:
    """All folds of all alphas as one run, and all alphas on all rows as another."""
    grid = np.unique(np.asarray(ALPHAS("alphas", alphas), np.float64))
    number = len(parts) * len(grid)
    crossed, costs = _in_folds(
        dataclasses.replace(
            spec,
            federated_data=[part for part in parts for _ in grid],
            key=jnp.stack([spec.key] * number),
            over=jnp.tile(jnp.asarray(grid, float), len(parts)),
        ),
        metric,
    )
    run = _on_all_rows(dataclasses.replace(spec, over=jnp.asarray(grid, float)))
    return [
        Arm(
            f"{alpha:g}",
            joined(costs[place :: len(grid)]),
            run,
            place,
            crossed,
            range(place, number, len(grid)),
        )
        for place, alpha in enumerate(grid)
    ]


def by_name(spec: RunSpec, parts: Folds, metric: str) -> list[Arm]:
    """Every method with its folds as one run."""
    methods: Any = spec.algorithm
    each = [dataclasses.replace(spec, algorithm=of) for of in methods.values()]
    return [
        _arm(name, _of_folds(own, parts), own, metric)
        for name, own in zip(methods, each, strict=True)
    ]


def trained_alone(spec: RunSpec, alone: Algorithm, parts: Folds, metric: str) -> Arm:
    """Training alone, for the number of rounds that is best in all folds together."""
    own = without_others(dataclasses.replace(spec, algorithm=alone))
    crossed = _of_folds(own, parts)
    trial = trying(crossed, metric)
    for _ in prolonged(trial, metric, spec.rounds):
        pass
    rounds = of_best_length(set_up(crossed), trial, metric, spec.rounds).rounds
    crossed, own = (
        dataclasses.replace(one, rounds=rounds, every=max(rounds, 1))
        for one in (crossed, own)
    )
    return _arm(ALONE, crossed, own, metric)


def _arm(name: str, in_folds: RunSpec, on_all_rows: RunSpec, metric: str) -> Arm:
    """An arm with runs of its own."""
    crossed, costs = _in_folds(in_folds, metric)
    run = _on_all_rows(on_all_rows)
    return Arm(name, joined(costs), run, None, crossed, range(len(costs)))


def _of_folds(spec: RunSpec, parts: Folds) -> RunSpec:
    key = jnp.stack([spec.key] * len(parts))
    return dataclasses.replace(spec, federated_data=parts, key=key)


def _in_folds(spec: RunSpec, metric: str) -> tuple[Run, list[Costs]]:
    """The run, and costs of every replica's clients on held-out rows, one by one."""
    decides = {metric: spec.measure[metric]}
    on = dataclasses.replace(spec, measure=decides, splits=["validation"])
    run, counts = set_up(on).complete(), spec.federations[0].splits["validation"].counts
    sign = cost_sign(spec.measure[metric])
    costs = [
        [
            sign * np.asarray(rows[:count], np.float64)
            for rows, count in zip(
                of["validation"]["personal"][metric], counts, strict=True
            )
        ]
        for of in run.by_row
    ]
    return run, costs


def joined(parts: Sequence[Costs]) -> Costs:
    """Every client's rows of all folds."""
    return [np.concatenate(rows) for rows in zip(*parts, strict=True)]


def _on_all_rows(spec: RunSpec) -> Run:
    """The models that are deployed."""
    tested = ["test"] if spec.federations[0].test is not None else []
    measure = spec.measure if tested else {}
    own = dataclasses.replace(spec, measure=measure, splits=tested)
    return set_up(own).complete()


def cost_sign(metric: Metric) -> int:
    """The sign that makes a metric a cost, and a cost the metric."""
    return -1 if metric.higher_is_better else 1

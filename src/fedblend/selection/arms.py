# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Arms: what each costs on rows that its models did not see, and their averages.

An arm is a way to get a model: a mixture at one alpha, another method, training alone.
Its models are trained K times without one fold of every client's rows, side by side as
replicas of one simulation, and once on all rows, to be deployed.

Folds rarely tell which arm is best for a client. To take the likeliest is to bet on it;
the mean of all models, each weighted by the probability that it is best, loses less
when the bet is wrong::

    model_i = sum over arms a of P(a is best for i) model_ia

With a loss that is convex in the parameters, as that of linear models, Jensen's
inequality bounds what it costs by the mean of what the models cost. Networks give no
such promise, but their arms start at the same point and see the same batches. So the
bound is measured: the same means of the models of each fold, on the rows that the fold
held out. Where they cost more than the bound, mean over clients, nobody averages.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.batches import everything
from fedblend.checks import Number
from fedblend.core import Algorithm, PyTree, Shard
from fedblend.data.federated import FederatedData, Shards
from fedblend.metrics import Metric
from fedblend.simulation import compile
from fedblend.simulation.run import Run
from fedblend.simulation.simulate import RunSpec, set_up
from fedblend.simulation.train_alone import (
    prolong,
    set_best_length,
    spec_alone,
    trial_run,
)

ALONE = "alone"
"""The arm of clients that train alone."""
ALPHAS = Number(least=0, most=1, clients=True, each="several of them")
ROUNDING = 1e-6
"""What equal models may seem to cost more, by rounding."""
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


def alpha_arms(spec: RunSpec, parts: Folds, metric: str, alphas: Any) -> list[Arm]:
    """All folds of all alphas as one run, and all alphas on all rows as another."""
    grid = np.unique(np.asarray(ALPHAS("alphas", alphas), np.float64))
    number = len(parts) * len(grid)
    crossed, costs = _run_folds(
        dataclasses.replace(
            spec,
            federated_data=[part for part in parts for _ in grid],
            key=jnp.stack([spec.key] * number),
            over=jnp.tile(jnp.asarray(grid, float), len(parts)),
        ),
        metric,
    )
    run = _run_all_rows(dataclasses.replace(spec, over=jnp.asarray(grid, float)))
    return [
        Arm(
            f"{alpha:g}",
            join_folds(costs[place :: len(grid)]),
            run,
            place,
            crossed,
            range(place, number, len(grid)),
        )
        for place, alpha in enumerate(grid)
    ]


def method_arms(spec: RunSpec, parts: Folds, metric: str) -> list[Arm]:
    """Every method with its folds as one run."""
    methods: Any = spec.algorithm
    each = [dataclasses.replace(spec, algorithm=of) for of in methods.values()]
    return [
        _arm(name, _fold_spec(own, parts), own, metric)
        for name, own in zip(methods, each, strict=True)
    ]


def alone_arm(spec: RunSpec, alone: Algorithm, parts: Folds, metric: str) -> Arm:
    """Training alone, for the number of rounds that is best in all folds together."""
    own = spec_alone(dataclasses.replace(spec, algorithm=alone))
    crossed = _fold_spec(own, parts)
    trial = trial_run(crossed, metric)
    for _ in prolong(trial, metric, spec.rounds):
        pass
    rounds = set_best_length(set_up(crossed), trial, metric, spec.rounds).rounds
    crossed, own = (
        dataclasses.replace(one, rounds=rounds, every=max(rounds, 1))
        for one in (crossed, own)
    )
    return _arm(ALONE, crossed, own, metric)


def _arm(name: str, in_folds: RunSpec, on_all_rows: RunSpec, metric: str) -> Arm:
    """An arm with runs of its own."""
    crossed, costs = _run_folds(in_folds, metric)
    run = _run_all_rows(on_all_rows)
    return Arm(name, join_folds(costs), run, None, crossed, range(len(costs)))


def _fold_spec(spec: RunSpec, parts: Folds) -> RunSpec:
    key = jnp.stack([spec.key] * len(parts))
    return dataclasses.replace(spec, federated_data=parts, key=key)


def _run_folds(spec: RunSpec, metric: str) -> tuple[Run, list[Costs]]:
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
        for of in run.evidence.by_row
    ]
    return run, costs


def join_folds(parts: Sequence[Costs]) -> Costs:
    """Every client's rows of all folds."""
    return [np.concatenate(rows) for rows in zip(*parts, strict=True)]


def _run_all_rows(spec: RunSpec) -> Run:
    """The models that are deployed."""
    tested = ["test"] if spec.federations[0].test is not None else []
    measure = spec.measure if tested else {}
    own = dataclasses.replace(spec, measure=measure, splits=tested)
    return set_up(own).complete()


def cost_sign(metric: Metric) -> int:
    """The sign that makes a metric a cost, and a cost the metric."""
    return -1 if metric.higher_is_better else 1


def mean_model(models: Sequence[PyTree], weights: np.ndarray) -> PyTree:
    """The mean, of models with weight; a single one remains what it is.

    >>> mean_model([jnp.ones(2), jnp.zeros(2)], np.array([0.25, 0.75])).tolist()
    [0.25, 0.25]
    """
    used = np.flatnonzero(weights)
    if len(used) == 1:
        return models[used[0]]

    def mean(*leaves):
        stacked = jnp.stack([leaves[place] for place in used])
        return jnp.tensordot(jnp.asarray(weights[used], stacked.dtype), stacked, 1)

    return jax.tree.map(mean, *models)


def models_of(arms: Sequence[Arm], client: int, fold: int | None = None) -> list:
    """The models of all arms for a client, of all rows or without a fold."""
    runs = {id(arm.run_of(fold)): arm.run_of(fold) for arm in arms}
    found = {key: run.personal(client) for key, run in runs.items()}
    return [
        trees.take(found[id(arm.run_of(fold))], place)
        if (place := arm.replica_of(fold)) is not None
        else found[id(arm.run_of(fold))]
        for arm in arms
    ]


def row_metrics(models: Iterable[PyTree], shards: Shards, metric: Metric) -> Costs:
    """The metric of every client's model on each of its rows."""
    here = dataclasses.replace(shards, examples=jax.device_put(shards.examples))
    return [
        np.asarray(_rows(metric, model, here.shard(i)), np.float64)[: shards.counts[i]]
        for i, model in enumerate(models)
    ]


@partial(compile.jit, static=1)
def _rows(metric: Metric, model: PyTree, shard: Shard) -> jax.Array:
    assert metric.with_rows is not None  # it decides
    return metric.with_rows(model, everything(shard))[1]


def average_costs(
    arms: Sequence[Arm], weights: np.ndarray, parts: Folds, metric: Metric
) -> Costs | None:
    """What averages cost on rows that a fold held out; None where nobody averages.

    A client sends one number, what its average costs beyond the mean of what its models
    cost; the mean decides.

    Args:
        arms: whose models are averaged.
        weights: [folds, clients, arms], of the models without each fold.
        parts: the folds.
        metric: which decides.
    """
    if not can_average(models_of(arms, 0)):
        return None
    found = [
        row_metrics(
            (
                mean_model(models_of(arms, client, fold), own)
                for client, own in enumerate(weights[fold])
            ),
            part.splits["validation"],
            metric,
        )
        for fold, part in enumerate(parts)
    ]
    costs = [cost_sign(metric) * rows for rows in join_folds(found)]
    bounds = mix_costs(arms, weights)
    beyond = [
        (rows - bound).mean()
        for rows, bound in zip(costs, bounds, strict=True)
        if rows.size
    ]
    return costs if np.mean(beyond) <= ROUNDING else None


def mix_costs(arms: Sequence[Arm], weights: np.ndarray) -> Costs:
    """What models of arms cost on each row, means by weights [folds, clients, arms]."""

    def client_costs(client: int) -> np.ndarray:
        costs = np.stack([arm.costs[client] for arm in arms])
        parts = zip(weights, np.split(costs, len(weights), axis=1), strict=True)
        return np.concatenate([own[client] @ rows for own, rows in parts])

    return [client_costs(client) for client in range(weights.shape[1])]


def can_average(models: Sequence[PyTree]) -> bool:
    """Whether models are the same trees of numbers that are not whole."""
    shapes = {str(jax.tree.map(jnp.shape, one)) for one in models}
    kinds = [jnp.result_type(leaf) for leaf in jax.tree.leaves(list(models))]
    return len(shapes) == 1 and all(jnp.issubdtype(one, jnp.floating) for one in kinds)

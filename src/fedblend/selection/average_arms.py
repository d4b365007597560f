# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The models of several arms, averaged: what a client deploys that is not sure.

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

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.batches import everything
from fedblend.core import PyTree, Shard
from fedblend.data.federated import Shards
from fedblend.metrics import Metric
from fedblend.selection.cross_validate import Arm, Costs, Folds, cost_sign, joined
from fedblend.simulation import lowering

ROUNDING = 1e-6
"""What equal models may seem to cost more, by rounding."""


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


def measured(models: Iterable[PyTree], shards: Shards, metric: Metric) -> Costs:
    """The metric of every client's model on each of its rows."""
    here = dataclasses.replace(shards, examples=jax.device_put(shards.examples))
    return [
        np.asarray(_rows(metric, model, here.shard(i)), np.float64)[: shards.counts[i]]
        for i, model in enumerate(models)
    ]


@partial(lowering.jit, static=1)
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
        measured(
            (
                mean_model(models_of(arms, client, fold), own)
                for client, own in enumerate(weights[fold])
            ),
            part.splits["validation"],
            metric,
        )
        for fold, part in enumerate(parts)
    ]
    costs = [cost_sign(metric) * rows for rows in joined(found)]
    bounds = weighted_costs(arms, weights)
    beyond = [
        (rows - bound).mean()
        for rows, bound in zip(costs, bounds, strict=True)
        if rows.size
    ]
    return costs if np.mean(beyond) <= ROUNDING else None


def weighted_costs(arms: Sequence[Arm], weights: np.ndarray) -> Costs:
    """What models of arms cost on each row, means by weights [folds, clients, arms]."""

    def of_client(client: int) -> np.ndarray:
        costs = np.stack([arm.costs[client] for arm in arms])
        parts = zip(weights, np.split(costs, len(weights), axis=1), strict=True)
        return np.concatenate([own[client] @ rows for own, rows in parts])

    return [of_client(client) for client in range(weights.shape[1])]


def can_average(models: Sequence[PyTree]) -> bool:
    """Whether models are the same trees of numbers that are not whole."""
    shapes = {str(jax.tree.map(jnp.shape, one)) for one in models}
    kinds = [jnp.result_type(leaf) for leaf in jax.tree.leaves(list(models))]
    return len(shapes) == 1 and all(jnp.issubdtype(one, jnp.floating) for one in kinds)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""F9's runs: FLIX on networks beside FedAvg, training alone, and fine-tuning.

A task is run the same way whatever its data. Every method is given as many rates to
try as the others; which one counts is decided on validation rows. All runs start at
the same parameters, and seeds differ in their cohorts and batches.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.core import Loss
from fedblend.data.batches import everything
from fedblend.papers.flix.network_task import (
    Lane,
    Score,
    Scores,
    Task,
    completed,
    scores_of,
    start,
)


class Own(NamedTuple):
    """x_i found at each rate: their models, scores and gradient norms over clients.

    ``start`` are the norms where all of them started.
    """

    models: list[Any]
    scores: list[Score]
    norms: np.ndarray
    start: np.ndarray


def own_models(task: Task) -> Own:
    """x_i for every rate, by plain SGD, and the norms of their full gradients."""
    work, clients = task.plan.own, task.federation.clients
    slope = fb.objectives.gradient(task.loss)

    def build(rate):
        def solve(params, shard, key):
            def norm(here):
                return jnp.sqrt(fb.trees.squared_norm(slope(here, everything(shard))))

            here, _ = fb.descend(
                slope,
                params,
                shard,
                key,
                optimizer=rate,
                steps=work.steps,
                batch_size=work.batch_size,
            )
            return here, jnp.stack([norm(params), norm(here)])

        return fb.flix(task.loss, _idle, alpha=0.0, local=solve)

    run = completed(
        task,
        build,
        start(task),
        0,
        over=jnp.asarray(work.rates, jnp.float32),
        chunk=min(task.plan.clients, clients),
    )
    states = run.store.gather(np.arange(clients))
    models = [
        jax.tree.map(lambda leaf, lane=lane: leaf[:, lane], states.personal)
        for lane in range(len(work.rates))
    ]
    before, after = np.moveaxis(np.asarray(states.norm), (2, 1), (0, 1))
    return Own(models, scores_of(run), after, before[0])


def _idle(loss: Loss) -> fb.Algorithm:
    """The method of runs without rounds."""
    return fb.fedavg(loss, 0.0, steps=1, batch_size=1)


def minibatch(task: Task) -> Callable[[Loss, Any], fb.Algorithm]:
    """The paper's method: a minibatch gradient each, an optimiser at the server."""
    size = task.plan.flix.batch_size

    def method(loss, rate):
        return fb.fedopt(loss, 1.0, task.server(rate), steps=1, batch_size=size)

    return method


def local_steps(task: Task) -> Callable[[Loss, Any], fb.Algorithm]:
    """FedAvg, as the method of FLIX with local steps too."""
    work = task.plan.fedavg

    def method(loss, rate):
        return fb.fedavg(loss, rate, steps=work.steps, batch_size=work.batch_size)

    return method


def flix(
    task: Task, own: Sequence[Any], method, lanes: Sequence[Lane], rounds: int
) -> Scores:
    """FLIX, so many lanes at a time; ``own`` has the x_i that a lane names."""

    def build(lane):
        alpha, rate, models = lane
        local = fb.pure_local.given(models)
        return fb.flix(
            task.loss, lambda loss: method(loss, rate), alpha=alpha, local=local
        )

    def some(group: Sequence[Lane]) -> list[Score]:
        # An argument of the compiled program, since a constant of this size stalls it.
        models = [own[lane.own] for lane in group]
        copies = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
        over = (*_numbers(group), copies)
        return scores_of(
            completed(task, build, start(task), rounds, over=over, key=_keys(group))
        )

    found, most = [], task.plan.lanes
    for first in range(0, len(lanes), most):
        found += some(lanes[first : first + most])
    return dict(zip(lanes, found, strict=True))


def fedavg(task: Task, lanes: Sequence[Lane]) -> tuple[Scores, dict[Lane, Any]]:
    """FedAvg, and the shared models it ends with."""
    method = local_steps(task)
    run = completed(
        task,
        lambda rate: method(task.loss, rate),
        start(task),
        task.plan.rounds,
        over=_numbers(lanes)[1],
        key=_keys(lanes),
    )
    scores = dict(zip(lanes, scores_of(run), strict=True))
    ends = {lane: fb.trees.take(run.shared, place) for place, lane in enumerate(lanes)}
    return scores, ends


def finetuned(task: Task, ends: Sequence[Any]) -> Scores:
    """Local steps from shared models, one for each seed."""
    work, scores = task.plan.tune, {}

    def build(rate):
        return fb.finetune(
            _idle(task.loss),
            task.loss,
            rate,
            steps=work.steps,
            batch_size=work.batch_size,
        )

    for seed, end in enumerate(ends):
        run = completed(task, build, end, 0, over=jnp.asarray(work.rates, jnp.float32))
        for rate, score in zip(work.rates, scores_of(run), strict=True):
            scores[Lane(0, 1.0, rate, seed)] = score
    return scores


def _numbers(lanes: Sequence[Lane]) -> tuple[jax.Array, jax.Array]:
    alphas = jnp.asarray([lane.alpha for lane in lanes], jnp.float32)
    return alphas, jnp.asarray([lane.rate for lane in lanes], jnp.float32)


def _keys(lanes: Sequence[Lane]) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.asarray([lane.seed for lane in lanes]))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL with fixed alpha, deployed as the averages that its theorems speak of.

The steps are those of ``apfl``. Let w_j^t and v_i^t be the models after local step t =
1, 2 ..., counted over all rounds, U_t the cohort, p_t = (t + a)^2 and S_T their sum::

    w_hat   = 1/S_T sum_t p_t mean over j in U_t of w_j^t
    v_hat_i = 1/S_T sum_t p_t (1 - alpha_i) v_i^t  +  alpha_i w_hat

Nobody ever knows the mean over the cohort at a local step, nor needs to: means over j
and over t commute. A client sends the p-weighted mean of its w_j^t of the round, their
mean is the round's part of w_hat, and w_hat, the same for all, is told with the next
message. v_i stands still while client i is not chosen; the weight that passed meanwhile
is told too. So both averages are exact after every round; messages are twice as long
both ways. ``down.extra.model`` is w_hat.

Where this differs from the paper: alpha is the weight of the shared model; a round in
which nobody is heard is in no average; p_t is divided by a^2, which cancels.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import mixing, trees
from fedblend.algorithms.averages import Averages, averaging, joined
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import ALPHA, COUNT, POSITIVE, ByClient, gate
from fedblend.core import Algorithm, Loss, PyTree, Up
from fedblend.local import WORK, Work, descend, resolve
from fedblend.losses import gradient, objective
from fedblend.shards import per_client


class AveragedClient(NamedTuple):
    """What a client keeps: v, and its average until the client's last round."""

    personal: PyTree
    past: Averages


@gate(**WORK, alpha=ALPHA, shift=POSITIVE)
def apfl_averaged(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    shift: float,
) -> Algorithm:
    """APFL whose deployed models are averages over all local steps.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round, with one number of steps for all clients;
            ``theory.apfl`` has the optimizer of theory.
        alpha: weight of the shared model; a number, or an array over clients.
        shift: a, see above.
    """
    steps = COUNT("apfl_averaged: work: steps", work.steps)
    inner = fedavg(loss, work)

    def weights(round):
        return jnp.square(1 + (round * steps + 1 + jnp.arange(steps)) / shift)

    def enroll(params, shard, key):
        del shard, key
        return (), AveragedClient(params, Averages(params, jnp.zeros((), float)))

    def start(params, joins, central, key):
        down, server = inner.start(params, joins, central, key)
        return down._replace(extra=Averages(params, jnp.zeros((), float))), server

    def client(down, client, shard, key):
        rule = resolve(work.optimizer, down.round, steps)
        rules = optax.partition({"w": rule, "v": rule}, ("w", "v"))
        mix = partial(mixing.parameters, per_client(alpha, shard))

        def direction(here, batch):
            (shared, personal), means = here
            own = jax.grad(lambda v: objective(loss, mix(shared, v), batch))(personal)
            return (gradient(loss)(shared, batch), own), trees.zeros_like(means)

        models = (down.shared, client.personal)
        (reached, means), (mean_gradient, _) = descend(
            direction,
            (models, trees.zeros_like(models)),
            shard,
            key,
            work=work._replace(optimizer=averaging(rules, weights(down.round))),
            correction=((down.correction, None), None),
        )
        still = joined(client.past, client.personal, down.extra.weight)
        past = joined(still, means[1], still.weight + weights(down.round).sum())
        delta = trees.subtract(reached[0], down.shared)
        return Up(delta, mean_gradient[0], extra=means[0]), AveragedClient(
            reached[1], past
        )

    def server(aggregate, down, server, central, key):
        weight = down.extra.weight + weights(down.round).sum()
        extra = joined(down.extra, aggregate.mean.extra, weight)
        down, server = inner.server(aggregate, down, server, central, key)
        return down._replace(extra=extra), server

    def personal(down, client, shard, key):
        del key
        own = joined(client.past, client.personal, down.extra.weight)
        return mixing.parameters(per_client(alpha, shard), down.extra.model, own.model)

    needs = inner.needs._replace(weights="uniform")
    return Algorithm(enroll, start, client, server, personal, needs=needs)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL with fixed alpha, whose deployed models are the averages of its theorems.

The local steps are those of ``apfl``. Let w_j^t and v_i^t be the models after local
step t = 1, 2 ..., counted over all rounds, U_t the cohort, p_t = (t + a)^2 and S_T the
sum of p_1 to p_T. Algorithm 1 returns::

    w_hat   = 1/S_T sum_t p_t mean over j in U_t of w_j^t
    v_hat_i = 1/S_T sum_t p_t (1 - alpha_i) v_i^t  +  alpha_i w_hat

Means over j and over t commute, so that no one needs the mean over the cohort at a
local step: a client sends the p-weighted mean of its w_j^t of the round, the mean of
these over the cohort is the round's part of w_hat, and the server broadcasts w_hat and
S_T with the next model. v_i stays while client i is not in the cohort, and S_T tells
the client for how long. Both averages are exact after every round; messages are twice
as long in both directions. ``down.extra["apfl"].model`` is w_hat.

Where this differs from the paper: alpha is the weight of the shared model; a round
without any answer is in no average; p_t is divided by a^2, which cancels.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import mixing, trees
from fedblend.algorithms.apfl import Variables, gradients
from fedblend.algorithms.fedavg import fedavg
from fedblend.batches import client_entry
from fedblend.checks import COUNT, Alpha, Positive, gate
from fedblend.core import Algorithm, Loss, PyTree, Up
from fedblend.local import Work, descend, resolve


class Average(NamedTuple):
    """The average of a model over steps, and the sum of the weights of these steps."""

    model: PyTree
    weight: jax.Array


def extend(past: Average, model: PyTree, weight: jax.Array) -> Average:
    """The average over more steps.

    Args:
        past: the average so far.
        model: the average over the steps since.
        weight: the sum of all weights, ``past.weight`` included.
    """
    old = past.weight / jnp.where(weight > 0, weight, 1)
    return Average(mixing.parameters(old, past.model, model), weight)


def averaging(
    rule: optax.GradientTransformation, weights: jax.Array
) -> optax.GradientTransformation:
    """An optimizer of a pair of trees: a model, and its average over the steps.

    Args:
        rule: the optimizer of the model.
        weights: of the models after each step; the second tree, zeros at first, becomes
            the average of these models.
    """
    shares = weights / weights.sum()

    def init(params):
        return rule.init(params[0]), jnp.zeros((), jnp.int32)

    def update(updates, state, params=None):
        assert params is not None
        inner, count = state
        step, inner = rule.update(updates[0], inner, params[0])
        reached = optax.apply_updates(params[0], step)
        return (step, trees.scale(shares[count], reached)), (inner, count + 1)

    return optax.GradientTransformation(init, update)


class AveragedClient(NamedTuple):
    """The state of client i: v_i, and its average until the client's last round."""

    personal: PyTree
    past: Average


@gate()
def apfl_averaged(
    loss: Loss, work: Work, *, alpha: Alpha, shift: Positive
) -> Algorithm:
    """APFL whose deployed models are averages over all local steps.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round, with one number of steps for all clients;
            ``Scheduled(decay, "step")`` with a rate ``c/(t + shift)`` in the theorems.
        alpha: weight of the shared model; a number, or an array over clients.
        shift: the a of the weights (t + a)^2, above 0.
    """
    steps = COUNT("apfl_averaged: work: steps", work.steps)
    inner, gradients_at = fedavg(loss, work), gradients(loss, mixing.parameters)

    def weights(round):
        return jnp.square(1 + (round * steps + 1 + jnp.arange(steps)) / shift)

    def enroll(params, shard, key):
        return (), AveragedClient(params, Average(params, jnp.zeros((), float)))

    def start(params, joins, central, key):
        down, server = inner.start(params, joins, central, key)
        first = Average(params, jnp.zeros((), float))
        return down._replace(extra={"apfl": first}), server

    def client(down, client, shard, key):
        rule = resolve(work.optimizer, down.round, steps)
        rules = optax.partition({"w": rule, "v": rule}, ("w", "v"))
        weight = client_entry(alpha, shard)

        def direction(here, batch):
            (shared, personal), means = here
            found = gradients_at(Variables(shared, personal, weight), batch)
            return (found.shared, found.personal), trees.zeros_like(means)

        models = (down.shared, client.personal)
        (reached, means), (mean_gradient, _) = descend(
            direction,
            (models, trees.zeros_like(models)),
            shard,
            key,
            work=work._replace(optimizer=averaging(rules, weights(down.round))),
            correction=((down.correction, None), None),
        )
        still = extend(client.past, client.personal, down.extra["apfl"].weight)
        past = extend(still, means[1], still.weight + weights(down.round).sum())
        delta = trees.subtract(reached[0], down.shared)
        up = Up(delta, mean_gradient[0], extra={"apfl": means[0]})
        return up, AveragedClient(reached[1], past)

    def server(aggregate, down, server, central, key):
        weight = down.extra["apfl"].weight + weights(down.round).sum()
        extra = extend(down.extra["apfl"], aggregate.mean.extra["apfl"], weight)
        down, server = inner.server(aggregate, down, server, central, key)
        return down._replace(extra={"apfl": extra}), server

    def personal(down, client, shard, key):
        own = extend(client.past, client.personal, down.extra["apfl"].weight)
        return mixing.parameters(
            client_entry(alpha, shard), down.extra["apfl"].model, own.model
        )

    needs = inner.needs._replace(weights="uniform")
    return Algorithm(enroll, start, client, server, personal, needs=needs)

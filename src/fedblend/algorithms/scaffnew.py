# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Scaffnew: control variates, and a coin that skips most communications.

The problem is ``min over shared of sum_i p_i f_i(shared)``. Each client has a model x_i
and a control h_i, at first 0. All take a step, and one coin for all says what follows::

    xhat_i <- x_i - rate (grad f_i(x_i) - h_i)
    with probability p       x_i <- mean_j (xhat_j - rate/p h_j)
    with probability 1 - p   x_i <- xhat_i
    h_i <- h_i + p/rate (x_i - xhat_i)

Without communication h_i stays. A round is one communication, and the steps before it::

    h_i     <- h_i + p/rate (shared - xhat_i)           the end of the round before
    xhat_i  <- shared, then ``local`` ~ geometric(p) times:
               xhat_i <- xhat_i - rate (grad f_i(xhat_i) - h_i)
    shared  <- mean (xhat_i - rate/p h_i)

The server tosses, and says ``local`` with the model; its state has all steps so far.
``work.steps`` is the mean of ``local``, 1/p; with 1 it is gradient descent. The paper's
rate is 1/L, its p then 1/sqrt(L/mu): about sqrt(L/mu) log(1/eps) communications.

Where this differs from the paper: communications are given, not steps; 1/p is whole;
steps may be of minibatches. Weights are the simulation's, uniform ones the paper's. The
mean of h_i is 0 in exact arithmetic, so that the paper's Scaffnew leaves it out of the
mean. Here it stays, as in ProxSkip: it is 0 again after a round with a client unheard.

Reference: Mishchenko, Malinovsky, Stich, Richtárik, "ProxSkip: yes! Local gradient
steps provably lead to communication acceleration! Finally!", ICML 2022,
arXiv:2202.09357.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.batch_statistics import hold_statistics
from fedblend.checks import COUNT, POSITIVE, is_traced
from fedblend.core import Algorithm, Down, Key, Loss, Needs, PyTree, Up
from fedblend.local import Work, descend_times, require_constant_rate
from fedblend.losses import gradient
from fedblend.registry import algorithm, instead_of


class ScaffnewClient(NamedTuple):
    """What a client keeps: its control h_i, and xhat_i, where its last round ended."""

    control: PyTree
    reached: PyTree


class Coin(NamedTuple):
    """Local steps until the coin says to communicate; or all of them so far."""

    local: jax.Array


def toss(key: Key, p: float) -> jax.Array:
    """The local steps until a coin of probability p says to communicate."""
    return jax.random.geometric(keys.named(key, "scaffnew"), p, dtype=jnp.int32)


@algorithm(everyone=True)
def scaffnew(loss: Loss, work: Work) -> Algorithm:
    """Local steps with control variates, as many as a common coin says.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the constant rate of the local steps; the mean number of local steps in a
            round, the same for all clients; the rows of a step.
    """
    require_constant_rate("scaffnew: work", work)
    rate = POSITIVE("scaffnew: work: optimizer", work.optimizer)
    steps = COUNT("scaffnew: work: steps", work.steps)
    p = 1 / steps
    train = partial(descend_times, gradient(loss), work=work)

    def enroll(params, shard, key):
        return (), ScaffnewClient(trees.zeros_like(params), params)

    def start(params, joins, central, key):
        none = jnp.zeros((), jnp.int32)
        first = Coin(toss(key, p))
        return Down(params, none, extra={"scaffnew": first}), Coin(none)

    def client(down, client, shard, key):
        moved = hold_statistics(trees.subtract(down.shared, client.reached))
        control = trees.add(client.control, trees.scale(p / rate, moved))
        push = trees.add_where_given(trees.scale(-1, control), down.correction)
        reached, mean_gradient = train(
            down.shared, shard, key, times=down.extra["scaffnew"].local, correction=push
        )
        target = trees.subtract(reached, trees.scale(rate / p, control))
        up = Up(trees.subtract(target, down.shared), mean_gradient)
        return up, ScaffnewClient(control, reached)

    def server(aggregate, down, server, central, key):
        shared = trees.add(down.shared, aggregate.mean.delta)
        done = trees.add(server, down.extra["scaffnew"])
        extra = {"scaffnew": Coin(toss(key, p))}
        return down._replace(shared=shared, extra=extra), done

    # Noise in the shared model moves every h_i by p/rate times that noise.
    several = is_traced(steps) or steps > 1
    feedback = instead_of("scaffnew") if several else ""
    needs = Needs(everyone=True, mean=True, feedback=feedback)
    return Algorithm(enroll, start, client, server, needs=needs)

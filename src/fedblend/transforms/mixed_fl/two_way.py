# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two-way gradient transfer: clients and server train, each with the other's gradient.

A round of Algorithm 1 of the paper; x is the shared model, ``g_c = w_c / w_f grad f_c``
and b_c, b_f are the augmenting gradients, zero at first::

    clients  x_i <- x, then steps times:  x_i <- x_i - rate * (grad f_i(x_i) + b_c)
             x_f <- the wrapped server's step on the mean of x_i - x
    server   x_c <- x, then steps times:  x_c <- x_c - central rate * (g_c(x_c) + b_f)
    merge    x   <- x + (x_f - x) / 2 + (x_c - x) / 2
    next     b_c <- the mean of g_c(x_c) over the central steps
             b_f <- the mean of grad f_i(x_i) over the clients' steps
                  = - (mean of x_i - x) / (mean of rate times steps) - b_c      (10)

with the old b_c in (10). Central steps go as far as the clients do, unless
``optimizer`` is given: the central rate times ``steps`` is the clients' mean of rate
times steps. (10) costs one number beside the model. It holds for plain steps of one
rate only; other clients ``upload`` their mean gradient.

Where this differs from the paper: clients descend f_i and not ``w_f f_i``, so that
rates here are w_f times those of the paper. Algorithm 1, in the copy that we have, ends
before the merge and before the next b_c. Both sides descend the whole loss already, so
that their moves are averaged here; b_c is what b_f is at the clients, as in SCAFFOLD,
which the paper's proof reads it as. The paper's (10) has no weights of clients and is
wrong where these differ; here both means have the weights of the aggregation.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655.
"""

import jax.numpy as jnp

from fedblend import trees
from fedblend.core import Aggregate, Algorithm, Down, PyTree, Up
from fedblend.local import resolve
from fedblend.transforms.mixed_fl.central_loss import Central
from fedblend.transforms.mixed_fl.step import (
    MixedServer,
    Sent,
    Settings,
    central_steps,
    encoded_correction,
    merging,
    received,
    sending,
    step_sum,
    without_correction,
)


def two_way(algorithm: Algorithm, g_c: Central, settings: Settings) -> Algorithm:
    """The wrapped algorithm and central training, each with the other's gradient."""
    merge, steps, upload = merging(settings, "average"), settings.steps, settings.upload
    optimizer = settings.optimizer
    wanted = [] if upload else ["upload=True, since their gradient cannot be recovered"]
    wanted += ["an optimizer for the central steps"] if optimizer is None else []

    def sent(up):
        return Sent(
            step_sum(up, " and ".join(wanted)) if wanted else (),
            _mean_gradient(up) if upload else (),
        )

    def start(params, joins, rows, key):
        down, inner = algorithm.start(params, joins, rows, key)
        zeros = trees.zeros_like(down.shared)
        state = MixedServer(inner, merge.rule.init(down.shared), zeros)
        return without_correction(down)._replace(correction=zeros), state

    def server(aggregate, down, server, rows, key):
        aggregate, sent = received(aggregate)
        after, inner = algorithm.server(aggregate, down, server.inner, rows, key)
        rate = sent.step_sum / steps if optimizer is None else optimizer
        rule = resolve(rate, down.round, steps)
        b_f = server.federated_gradient
        x_c, b_c = central_steps(g_c, down.shared, rows, key, rule, steps, b_f)
        x, state = merge(down.shared, after.shared, x_c, server.merge)
        b_f = sent.mean_gradient if upload else recovered(aggregate, sent, down, b_f)
        # Of parameters that clients keep to themselves they send no gradient.
        b_f = trees.fill(b_f, trees.zeros_like(down.shared))
        return after._replace(shared=x, correction=b_c), MixedServer(inner, state, b_f)

    length = algorithm.needs.length or not upload
    needs = algorithm.needs._replace(mean=True, length=length)
    around = sending(algorithm, sent)._replace(start=start, server=server, needs=needs)
    return encoded_correction(around, settings.compressor)


def recovered(aggregate: Aggregate, sent: Sent, down: Down, before: PyTree) -> PyTree:
    """Equation (10): the mean gradient of clients that take plain steps of one rate.

    Args:
        aggregate: with the mean of the clients' moves.
        sent: with the mean of their rate times steps.
        down: with the correction that they added.
        before: the gradient of the round before, for a round in which nobody moved.
    """
    moved = sent.step_sum > 0
    pushed = trees.scale(-1 / jnp.where(moved, sent.step_sum, 1), aggregate.mean.delta)
    found = trees.subtract(pushed, trees.where_given(pushed, down.correction))
    return trees.select(moved, found, trees.where_given(pushed, before))


def _mean_gradient(up: Up) -> PyTree:
    if up.mean_gradient is None:
        raise ValueError(
            "mixed_fl: upload: these clients have no gradient to send (it would go "
            "past their privacy, or they keep it to themselves)"
        )
    return up.mean_gradient

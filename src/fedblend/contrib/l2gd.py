# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2GD: personal models that a common coin pulls toward their mean.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

The problem is ``min over all y_i of 1/n sum_i f_i(y_i) + lam/2n sum_i |y_i - ybar|^2``,
ybar being the mean of the y_i. A coin, one for all clients, decides the next step::

    with probability 1 - p   y_i <- y_i - rate grad f_i(y_i)
    with probability p       y_i <- y_i - pull (y_i - ybar),  pull = rate lam (1 - p)/p

Averaging leaves ybar where it is, so that of several in a row only the first needs
communication. A round is one communication, and what is tossed between two of them::

    y_i  <- ybar + (1 - pull)^averaging (y_i - ybar),     averaging ~ geometric(1 - p)
    y_i  <- ``local`` gradient steps,                         local ~ geometric(p)
    ybar <- mean y_i

The server tosses, and sends both counts with ybar; its state has the sums. A round
stands for 1/p + 1/(1 - p) tosses on average, of which a share p (1 - p) communicates.
``shared`` is ybar, ``personal`` is y_i after the averagings to come. ``lam = 0`` is
training alone, a pull of 1 FedAvg with random numbers of steps. A constant rate reaches
a neighborhood; the paper's best p is lam/(L + lam), its rate then 1/(2 L).

A new client takes the steps of Ditto from the shared model, the expected step of L2GD.

Where this differs from the paper: ``rate`` is the paper's alpha over n (1 - p), and may
change over rounds; steps may be of minibatches; communications are given, not tosses.
A configuration states the mean number of local steps, ``work.steps``, and p is 1 over
it: an algorithm with the same local work, such as training alone, takes as many steps.

Reference: Hanzely, Richtárik, "Federated learning of a mixture of global and local
models", 2020, arXiv:2002.05516.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import keys, mixing, trees
from fedblend.algorithms.ditto import ditto
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import (
    Chance,
    NotNegative,
    Number,
    gate,
    words,
)
from fedblend.core import Algorithm, Down, Loss, Needs, PyTree, Up
from fedblend.errors import UserError
from fedblend.local import BATCH_SIZE, Scheduled, Work, descend_times
from fedblend.losses import gradient
from fedblend.registry import NewClient, algorithm

RATE = Number(least=0, besides="a function", also=lambda key, value: callable(value))

INSTEAD = "ditto in place of l2gd"
"""A client sends y_i less the ybar it received, with all of an error in ybar."""


class L2gdClient(NamedTuple):
    """The state of a client: its own model y_i, as it was last sent."""

    personal: PyTree


class Tosses(NamedTuple):
    """Averagings that a round begins with, local steps that follow; or all so far."""

    averaging: jax.Array
    local: jax.Array


@gate()
def l2gd(
    loss: Loss,
    rate: Annotated[float | jax.Array | Callable[[jax.Array], jax.Array], RATE],
    *,
    lam: NotNegative,
    p: Chance,
    batch_size: Annotated[int | None, BATCH_SIZE],
) -> Algorithm:
    """Local gradient steps and moves toward the mean, by a common coin.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        rate: rate of the local steps; a number, or a function of the round.
        lam: strength of the pull toward the mean, 0 or more.
        p: probability of averaging, between 0 and 1.
        batch_size: number of rows of a step, None for all rows.
    """
    rate_at = rate if callable(rate) else lambda round: rate

    def toss(key) -> Tosses:
        own, ends = keys.named(key, "l2gd"), jnp.stack([1 - jnp.asarray(p), p])
        return Tosses(*jax.random.geometric(own, ends, dtype=jnp.int32))

    def average(down: Down, own: PyTree) -> PyTree:
        left = (1 - rate_at(down.round) * lam * (1 - p) / p) ** down.extra[
            "l2gd"
        ].averaging
        return mixing.parameters(1 - left, down.shared, own)

    def enroll(params, shard, key):
        return (), L2gdClient(params)

    def start(params, joins, central, key):
        none = jnp.zeros((), jnp.int32)
        first = Tosses(none, toss(key).local)  # nothing to average yet
        return Down(params, none, extra={"l2gd": first}), Tosses(none, none)

    def client(down, client, shard, key):
        work = Work(rate_at(down.round), 1, batch_size)
        train = partial(descend_times, gradient(loss), work=work)
        first, times = average(down, client.personal), down.extra["l2gd"].local
        reached, mean_gradient = train(
            first, shard, key, times=times, correction=down.correction
        )
        up = Up(trees.subtract(reached, down.shared), mean_gradient)
        return up, L2gdClient(reached)

    def server(aggregate, down, server, central, key):
        tosses, shared = toss(key), trees.add(down.shared, aggregate.mean.delta)
        done = Tosses(tosses.averaging, down.extra["l2gd"].local)
        return down._replace(shared=shared, extra={"l2gd": tosses}), trees.add(
            server, done
        )

    def personal(down, client, shard, key):
        return average(down, client.personal)

    needs = Needs(
        everyone=True,
        mean=True,
        uniform=True,
        weights="uniform",
        feedback=f"ef21, or {INSTEAD}",
        exact=INSTEAD,
    )
    return Algorithm(enroll, start, client, server, personal, needs=needs)


def near(loss: Loss, work: Work, *, lam: float) -> Algorithm:
    """What a new client runs: the expected step of L2GD is Ditto's."""
    return ditto(fedavg(loss, work._replace(steps=1)), loss, work, lam=lam)


@algorithm(name="l2gd", builder=l2gd, new_client=NewClient(build=near), everyone=True)
def l2gd_by_steps(loss: Loss, work: Work, *, lam: NotNegative) -> Algorithm:
    """L2GD with p = 1 / steps.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the rate of the local steps, constant or scheduled over rounds; the mean
            number of local steps in a round, above 1; the rows of a step.
        lam: strength of the pull toward the mean, 0 or more.
    """
    rate: Any = work.optimizer
    if not isinstance(work.steps, int) or work.steps < 2:
        allowed = "a mean number of steps in a round, above 1, the same for all clients"
        raise UserError("l2gd: work: steps", work.steps, allowed)
    if isinstance(rate, Scheduled) and rate.make is optax.sgd:
        words("round")("l2gd: work: schedule: unit", rate.unit)
        rate = rate.schedule
    if isinstance(rate, tuple):
        raise UserError(
            "l2gd: work: optimizer", rate, "a learning rate (a number)", "an optimizer"
        )
    return l2gd(loss, rate, lam=lam, p=1 / work.steps, batch_size=work.batch_size)

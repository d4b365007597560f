# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""pFedMe: personal models near the shared one, which follows their Moreau envelopes.

The problem is ``min over w of sum_i p_i F_i(w)`` with ``F_i(w) = min over theta of
f_i(theta) + lam/2 |theta - w|^2``, so that ``grad F_i(w) = lam (w - theta_i(w))``. A
round, for every client i of the cohort::

    w_i <- shared, then steps times, each on one batch:
           theta_i <- w_i, then inner_steps times:  theta_i <- theta_i - inner_rate *
                      grad of f_i(theta_i; batch) + lam/2 |theta_i - w_i|^2
           w_i     <- w_i - rate * lam (w_i - theta_i)
    shared <- shared + server_rate * mean (w_i - shared)

    personal_i = theta_i of the client's last local step

Three models, none an alias of another: shared; w_i, which lives for a round and of
which only ``w_i - shared`` travels; theta_i, which never leaves the client. Before its
first round a client deploys the initial parameters.

Where this differs from the paper: its inner solver is any, stopped by the norm of the
gradient; here it is gradient descent from w_i, of a given number of steps. Only the
cohort trains (in the paper all do, and some are averaged: the same shared model).
Weights are the run's (the paper's are equal: ``weights="uniform"``). The steps on
w_i may be any of optax's, with ``lam (w_i - theta_i)`` as gradient, to which
``down.correction`` is added.

Reference: Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes",
NeurIPS 2020, arXiv:2006.08848.
"""

from typing import NamedTuple

import jax
import optax

from fedblend import trees
from fedblend.algorithms.ditto import ditto
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.fedopt import fedopt
from fedblend.batch_statistics import refuse_statistics
from fedblend.checks import Count, Positive
from fedblend.core import Algorithm, Loss, PyTree, Up
from fedblend.local import Work, descend, plan_steps, resolve
from fedblend.losses import objective
from fedblend.registry import NewClient, algorithm


class PFedMeClient(NamedTuple):
    """The state of a client: its personal model theta_i."""

    personal: PyTree


def near(
    loss: Loss, work: Work, *, lam: float, inner_rate: float, inner_steps: int
) -> Algorithm:
    """What a new client runs: with a shared model that stands still, Ditto's steps."""
    own = Work(inner_rate, inner_steps, work.batch_size)
    return ditto(fedavg(loss, work), loss, own, lam=lam)


@algorithm(
    new_client=NewClient(steps="inner_steps", rate="inner_rate", build=near),
    defaults={"lam": 15.0, "inner_rate": 0.01},
)
def pfedme(
    loss: Loss,
    work: Work,
    *,
    lam: Positive,
    inner_rate: Positive,
    inner_steps: Count,
    server_rate: Positive = 1.0,
) -> Algorithm:
    """Local steps on Moreau envelopes; clients deploy the inner minimizer.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the steps on w_i: optimizer (its rate is the paper's eta), steps (the
            paper's R), batch size.
        lam: strength of the pull between theta_i and w_i, above 0.
        inner_rate: rate of the steps on theta_i, below 2 / (lam + smoothness of f_i).
        inner_steps: number of steps on theta_i for each step on w_i, the paper's K.
        server_rate: rate of the server, the paper's beta; 1 is plain averaging.
    """

    def pull(here, there):
        return 0.5 * lam * trees.sum_squares(trees.subtract(here, there))

    def nearby(local, batch):
        def loss_near(theta):
            return objective(loss, theta, batch) + pull(theta, local)

        def step(theta, _):
            move = trees.scale(inner_rate, jax.grad(loss_near)(theta))
            return trees.subtract(theta, move), None

        return jax.lax.scan(step, local, length=inner_steps)[0]

    def direction(models, batch):
        local, before = models
        theta = nearby(local, batch)
        # a step of rate 1 along the difference puts the new theta in place of the old
        return jax.grad(pull)(local, theta), trees.subtract(before, theta)

    def enroll(params, shard, key):
        refuse_statistics("pfedme", params)
        return (), PFedMeClient(params)

    def client(down, client, shard, key):
        own, _ = plan_steps(shard, work)
        follow = resolve(work.optimizer, down.round, own)
        rules = optax.partition({0: follow, 1: optax.sgd(1.0)}, (0, 1))
        (local, theta), (mean_gradient, _) = descend(
            direction,
            (down.shared, client.personal),
            shard,
            key,
            work=work._replace(optimizer=rules),
            correction=(down.correction, None),
        )
        up = Up(trees.subtract(local, down.shared), mean_gradient)
        return up, PFedMeClient(theta)

    return fedopt(loss, work, server_rate)._replace(
        enroll=enroll,
        client=client,
        personal=lambda down, client, shard, key: client.personal,
    )

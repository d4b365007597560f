# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Scafflix: FLIX by local steps of each client's own rate, and few communications.

The problem is that of ``flix``, with x_i* the client's own minimizer of f_i::

    min over shared of  1/n sum_i f_i(alpha_i shared + (1 - alpha_i) x_i*)

Each client has a model x_i, a control h_i, at first 0, and a rate gamma_i <= 1/L_i. All
take a step, and one coin for all says what follows::

    xhat_i <- x_i - gamma_i/alpha_i (grad f_i(alpha_i x_i + (1-alpha_i) x_i*) - h_i)
    with probability p       x_i <- xbar = sum_j w_j xhat_j / sum_j w_j
                             h_i <- h_i + p alpha_i/gamma_i (xbar - xhat_i)
    with probability 1 - p   x_i <- xhat_i                   w_i = alpha_i^2/gamma_i

A round is one communication, and the steps before it. In terms of the client's loss at
the mixture, f~_i, whose gradient autodiff writes, and of c_i = alpha_i h_i::

    c_i    <- c_i + p w_i (shared - xhat_i)             the end of the round before
    xhat_i <- shared, then ``local`` ~ geometric(p) times:
              xhat_i <- xhat_i - 1/w_i (grad f~_i(xhat_i) - c_i)
    sends     w_i (xhat_i - shared) - c_i/p,  and w_i
    shared <- shared + sum_i of the first / sum_i of the second

The server tosses, as in ``scaffnew``; ``work.steps`` is 1/p. With alpha = 1 and equal
rates it is Scaffnew, with p = 1 and equal w_i gradient descent on FLIX. With gamma_i =
1/L_i and p = 1/sqrt(max L_i/mu_i) it needs some sqrt(max L_i/mu_i) log(1/eps)
communications: see ``theory.local_training``. A client with alpha_i = 0 has w_i = 0: it
never moves the shared model.

Where this differs from the paper: communications are given, not steps; 1/p is whole;
steps may be of minibatches; it starts at x_avg. The sum of c_i is 0 in theory, so
that the paper leaves it out of the mean; see ``scaffnew`` why it stays.

Reference: Yi, Condat, Richtárik, "Explicit personalization and local training: double
communication acceleration in federated learning", 2023, arXiv:2305.13170.
"""

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import mixing, trees
from fedblend.algorithms.flix import flix
from fedblend.algorithms.scaffnew import scaffnew
from fedblend.batch_statistics import hold_statistics
from fedblend.batches import client_entry
from fedblend.checks import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    Alpha,
    ByClient,
    each_client,
)
from fedblend.core import Algorithm, Loss, PyTree, Up
from fedblend.errors import UserError
from fedblend.local import Work, descend_times, is_theory, own_rates
from fedblend.losses import gradient
from fedblend.mixing import Mixing
from fedblend.registry import OWN_MODEL, SOLVES, algorithm, instead_of
from fedblend.solvers import Solver
from fedblend.theory import local_training as theory
from fedblend.theory.local_training import scafflix_rates


class ScafflixClient(NamedTuple):
    """What a client keeps: c_i, xhat_i where its last round ended, if it had one."""

    control: PyTree
    reached: PyTree
    new: jax.Array


@algorithm(
    sends=("update", OWN_MODEL),
    new_client=SOLVES,
    theory=theory.scafflix,
    own_rates=True,
    coin=True,
    everyone=True,
)
def scafflix(
    loss: Loss,
    work: Annotated[Work, own_rates],
    *,
    alpha: Alpha,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    longer: bool = False,
    smooth: Annotated[ByClient | None, each_client(POSITIVE)] = None,
    convex: Annotated[ByClient | None, each_client(NOT_NEGATIVE)] = None,
) -> Algorithm:
    """FLIX by local steps with control variates, as many as a common coin says.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: gamma_i, the constant rates of steps on f_i: a number, an array over
            clients, or "theory"; the mean number of local steps in a
            round, the same for all clients; the rows of a step.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``.
        personal: how x_i* is found, from ``fedblend.solvers``.
        longer: "theory" stands for 2/(L_i + mu_i), up to which the proof of
            ``theory.local_training`` holds, and not for the paper's 1/L_i.
        smooth: L_i, for the weights of x_avg and theory's rates; a number, or an array
            over clients; None where they are unknown.
        convex: mu_i, for ``longer``; likewise.
    """
    known: Any = 1.0 if smooth is None else smooth
    own = is_theory(work.optimizer)
    if longer and not own:
        raise UserError("scafflix: longer", longer, 'False unless rate is "theory"')
    rates = scafflix_rates(smooth, convex, longer) if own else work.optimizer
    p = 1 / COUNT("scafflix: work: steps", work.steps)
    plain = scaffnew(loss, work._replace(optimizer=1.0))

    def enroll(params, shard, key):
        zeros = trees.zeros_like(params)
        return (), ScafflixClient(zeros, params, jnp.ones((), bool))

    def skipping(loss: Loss) -> Algorithm:
        slope = gradient(loss)

        def client(down, client, shard, key):
            own = client_entry(alpha, shard) ** 2 / client_entry(rates, shard)
            moved = hold_statistics(trees.subtract(down.shared, client.reached))
            settled = trees.add(client.control, trees.scale(p * own, moved))
            control = trees.select(client.new, client.control, settled)
            push = trees.add_where_given(trees.scale(-1, control), down.correction)
            rate = jnp.where(own > 0, 1 / jnp.where(own > 0, own, 1), 0)
            train = partial(descend_times, slope, work=work._replace(optimizer=rate))
            reached, mean_gradient = train(
                down.shared,
                shard,
                key,
                times=down.extra["scaffnew"].local,
                correction=push,
            )
            step = trees.scale(own, trees.subtract(reached, down.shared))
            delta = trees.subtract(step, trees.scale(1 / p, control))
            after = ScafflixClient(control, reached, jnp.zeros((), bool))
            return Up(delta, mean_gradient, extra={"scafflix": own}), after

        return plain._replace(enroll=enroll, client=client, server=server)

    def server(aggregate, down, server, central, key):
        total = aggregate.mean.extra["scafflix"]
        step = trees.scale(1 / jnp.where(total > 0, total, 1), aggregate.mean.delta)
        aggregate = aggregate._replace(mean=aggregate.mean._replace(delta=step))
        return plain.server(aggregate, down, server, central, key)

    made = flix(loss, skipping, alpha=alpha, local=personal, smooth=known, mix=mix)
    # As in ``scaffnew``, noise in the shared model moves every c_i.
    feedback = instead_of("scafflix") if made.needs.feedback else ""
    return made._replace(needs=made.needs._replace(feedback=feedback))

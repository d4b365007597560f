# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX with local steps: FedAvg or FedOpt on the mixture, as a configuration states it.

The problem and the mixture are those of ``flix``, which takes any method. A round, for
every client i of the cohort, with x_i the client's own model::

    y_i    <- shared, then steps times:
              y_i <- y_i - rate * grad in y_i of f_i(alpha_i y_i + (1 - alpha_i) x_i)
    delta  <- mean of y_i - shared
    shared <- shared + delta, or ServerOpt(shared, -delta) with a server optimizer

With one step, a gradient of all rows or of a batch, it is the paper's method: the
algorithm ``flix`` of a configuration.

Where this differs from the paper: several local steps are another method, which the
authors' code runs under the same name.

Reference: Gasanov, Khaled, Horváth, Richtárik, "FLIX: a simple and communication-
efficient alternative to local methods in federated learning", AISTATS 2022,
arXiv:2111.11556.
"""

from functools import partial

import numpy as np
import optax

from fedblend import mixing
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.fedopt import fedopt
from fedblend.algorithms.flix import flix
from fedblend.checks import ALPHA, POSITIVE, ByClient, by_client, gate, optional
from fedblend.core import Algorithm, Loss
from fedblend.errors import UserError
from fedblend.local import OPTIMIZER, WORK, Work
from fedblend.mixing import MIXING, Mixing
from fedblend.registry import OWN_MODEL, SOLVES, algorithm
from fedblend.solvers import SOLVER, Solver
from fedblend.theory.steps import dgd

RULES = {
    **WORK,
    "alpha": ALPHA,
    "mix": MIXING,
    "personal": SOLVER,
    "server": optional(OPTIMIZER),
    "smooth": by_client(POSITIVE),
}


@algorithm(sends=("update", OWN_MODEL), new_client=SOLVES)
@gate(**RULES)
def flix_local_steps(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    server: float | optax.GradientTransformation | None = None,
    smooth: ByClient = 1.0,
) -> Algorithm:
    """FLIX over FedAvg, or over FedOpt where the server has an optimizer.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: local work of a round on the shared model: optimizer, steps, batch size.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
        personal: how x_i is found, from ``fedblend.solvers``.
        server: optimizer of the server; None for plain averaging.
        smooth: L_i, for the weights of x_avg; a number, or an array over clients.
    """
    method = partial(fedavg, work=work)
    if server is not None:
        method = partial(fedopt, work=work, server_optimizer=server)
    return flix(loss, method, alpha=alpha, local=personal, smooth=smooth, mix=mix)


@algorithm(
    name="flix",
    builder=flix,
    sends=("update", OWN_MODEL),
    new_client=SOLVES,
    theory=dgd,
    # One gradient of all rows per round.
    defaults={"rate": 0.5, "steps": 1, "batch_size": "all"},
)
@gate(**RULES)
def flix_by_gradients(
    loss: Loss,
    work: Work,
    *,
    alpha: ByClient,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    server: float | optax.GradientTransformation | None = None,
    smooth: ByClient = 1.0,
) -> Algorithm:
    """FLIX with one gradient of every client in a round.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        work: optimizer and batch size of the gradient; one step.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
        personal: how x_i is found, from ``fedblend.solvers``.
        server: optimizer of the server; None for plain averaging.
        smooth: L_i, for the weights of x_avg; a number, or an array over clients.
    """
    if np.ndim(work.steps) or work.steps != 1:
        allowed = (
            "1: flix takes one gradient a round; more are the method flix_local_steps"
        )
        raise UserError("flix: work: steps", work.steps, allowed)
    return flix_local_steps(
        loss,
        work,
        alpha=alpha,
        mix=mix,
        personal=personal,
        server=server,
        smooth=smooth,
    )

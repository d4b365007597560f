# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX: every client deploys a mixture of the shared and its own local model.

The problem, with x_i a minimizer of f_i that client i finds on its own::

    min over shared of  1/n sum_i f_i(alpha_i shared + (1 - alpha_i) x_i)

is a finite sum like any other, so that any federated algorithm solves it: FLIX wraps
one, given as a function from a loss to an algorithm, and gives it each client's loss at
the mixture. Autodiff writes the factor alpha_i of the gradient. The rounds::

    enrollment   x_i <- pure local model; sends w_i x_i and w_i,  w_i = alpha_i^2 L_i
    start       shared <- x_avg = sum w_i x_i / sum w_i
    rounds      those of the wrapped algorithm
    deployed    alpha_i shared + (1 - alpha_i) x_i

With ``fedopt`` of one full gradient it is distributed gradient descent, the paper's
solver; with a minibatch and any server optimizer what the paper runs on networks; with
more local steps another method, which the authors' code runs under the same name; with
``svrg`` minibatches whose noise dies out; under ``diana`` compressed.

Where this differs from the paper: for its own solvers it does not. Weights are uniform
unless the run sets others; ``average="stationary"`` weighs by alpha_i^4 L_i^2, for x_i
that are stationary points only. A run that reduces by the median, say, takes that of
what clients send at enrollment, too. Wrapped methods with states enroll at the initial
parameters.

Reference: Gasanov, Khaled, Horváth, Richtárik, "FLIX: a simple and communication-
efficient alternative to local methods in federated learning", AISTATS 2022,
arXiv:2111.11556.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedblend import keys, mixing, trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.fedopt import fedopt
from fedblend.batches import client_entry
from fedblend.checks import (
    POSITIVE,
    Alpha,
    ByClient,
    Number,
    each_client,
    gate,
    optional,
    words,
)
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.errors import UserError
from fedblend.local import OPTIMIZER, Work
from fedblend.losses import compose
from fedblend.mixing import Mixing
from fedblend.registry import OWN_MODEL, SOLVES, algorithm
from fedblend.solvers import Solver
from fedblend.theory.steps import dgd


class FlixClient(NamedTuple):
    """The state of a client: x_i, its gradient norm, and the wrapped method's state."""

    personal: PyTree
    norm: jax.Array
    inner: PyTree


@gate()
def flix(
    loss: Loss,
    method: Callable[[Loss], Algorithm],
    *,
    alpha: Alpha,
    local: Solver,
    smooth: Annotated[ByClient, Number(least=0, clients=True)] = 1.0,
    average: Annotated[str, words("minimizer", "stationary")] = "minimizer",
    mix: Mixing = mixing.parameters,
) -> Algorithm:
    """Any algorithm on the mixture of the shared model and each client's own model.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes a ``Blend`` if ``mix``
            makes one.
        method: from a loss to the algorithm that solves the shared problem.
        alpha: weight of the shared model in [0, 1]; a number, or an array over clients.
        local: how x_i is found, from ``fedblend.solvers``.
        smooth: L_i, for the weights of x_avg; a number, or an array over clients.
        average: weights of x_avg: "minimizer" for alpha_i^2 L_i, "stationary" for
            alpha_i^4 L_i^2.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
    """
    power = 1 if average == "minimizer" else 2

    def own(personal, shard):
        weight = client_entry(alpha, shard)
        return method(compose(lambda params: mix(weight, params, personal), loss))

    def enroll(params, shard, key):
        personal, norm = local(params, shard, keys.named(key, "local model"))
        join, inner = own(personal, shard).enroll(params, shard, key)
        weight = (
            client_entry(alpha, shard) ** 2 * client_entry(smooth, shard)
        ) ** power
        sent = (trees.scale(weight, personal), weight)
        return (join, sent), FlixClient(personal, norm, inner)

    def start(params, joins, central, key):
        join, (total, weight) = joins.mean
        average = trees.scale(1 / jnp.where(weight > 0, weight, 1), total)
        first = trees.select(weight > 0, average, params)
        aggregate = joins._replace(mean=join)
        return method(loss).start(first, aggregate, central, key)

    def client(down, client, shard, key):
        inner = own(client.personal, shard)
        up, state = inner.client(down, client.inner, shard, key)
        return up, client._replace(inner=state)

    def personal(down, client, shard, key):
        return mix(client_entry(alpha, shard), down.shared, client.personal)

    inner = method(loss)

    def info(client):
        own = {"local_model": client.personal, "local_model_gradient_norm": client.norm}
        return own | inner.info(client.inner)

    return inner._replace(
        enroll=enroll,
        start=start,
        client=client,
        personal=personal,
        wire=inner.wire._replace(
            ask=lambda client, shard: inner.wire.ask(client.inner, shard)
        ),
        info=info,
        needs=inner.needs._replace(weights="uniform"),
    )


@algorithm(sends=("update", OWN_MODEL), new_client=SOLVES)
def flix_local_steps(
    loss: Loss,
    work: Work,
    *,
    alpha: Alpha,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    server: Annotated[
        float | optax.GradientTransformation | None, optional(OPTIMIZER)
    ] = None,
    smooth: Annotated[ByClient, each_client(POSITIVE)] = 1.0,
) -> Algorithm:
    """FLIX with local steps: FedAvg or FedOpt on the mixture, as a configuration states
    it.

    The problem and the mixture are those of ``flix``, which takes any method. A round,
    for every client i of the cohort, with x_i the client's own model::

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
def flix_by_gradients(
    loss: Loss,
    work: Work,
    *,
    alpha: Alpha,
    mix: Mixing = mixing.parameters,
    personal: Solver,
    server: Annotated[
        float | optax.GradientTransformation | None, optional(OPTIMIZER)
    ] = None,
    smooth: Annotated[ByClient, each_client(POSITIVE)] = 1.0,
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

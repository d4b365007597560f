# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL as other libraries run it, for comparison; ``fb.apfl`` is the paper's method.

``apfl_fedtorch``, the authors' own code. With a = 1 - alpha, the weight of v, and F the
loss of the mixed OUTPUTS of both models, each line uses the results of those before::

    w <- w - rate * grad f(w)
    v <- v - rate * grad in v of F
    a <- a - rate * (<v - w, a dF/dv + (1 - a) dF/dw> + 0.02 a)   with the first step

dF/dv and dF/dw have the factors a and 1 - a already: the step of a has them twice, and
its last term is in no equation of the paper. Clients deploy their models as they are
before the server averages.

``apfl_fedjax`` mixes parameters, every tensor with an alpha of its own; v steps along
``grad f(mix)`` without the factor ``1 - alpha``; the weight of a client is its number
of rows.

Where this differs from both: batches are drawn as everywhere in fedblend. FedTorch
decays the rate of w and not that of v, here both are constant. FedJAX starts v at the
shared model of the client's first round, here v starts at the initial model.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020,
arXiv:2003.13461; code: MLOPTPSU/FedTorch and google/fedjax on GitHub.
"""

from typing import Annotated, get_args

import jax
import jax.numpy as jnp

from fedblend import mixing, trees
from fedblend.algorithms.apfl import (
    ApflClient,
    Gradients,
    Learn,
    Learning,
    Variables,
    local_steps,
)
from fedblend.algorithms.fedavg import fedavg
from fedblend.batches import client_entry
from fedblend.checks import NOT_NEGATIVE, Alpha, gate, words
from fedblend.core import Algorithm, Batch, Down, Key, Loss, Shard, Up
from fedblend.local import Work, step_sum_of
from fedblend.losses import gradient, objective

SHRINKAGE = 0.02
"""FedTorch's pull of v's weight to 0."""


@gate()
def apfl_fedtorch(
    loss: Loss,
    work: Work,
    *,
    alpha: Alpha,
    learn: Annotated[Learn, words(*get_args(Learn))] = "round",
) -> Algorithm:
    """APFL as in FedTorch, with plain SGD.

    Args:
        loss: takes a ``Blend``, as all of ``fedblend.losses`` do.
        work: local work, whose optimizer is a rate: that of w, v and alpha.
        alpha: first weight of the shared model; a number, or an array over clients.
        learn: "round", as in FedTorch, or "fixed".
    """
    rate = NOT_NEGATIVE("apfl_fedtorch: work: optimizer", work.optimizer)

    def ensemble_loss(shared, personal, alpha, batch):
        return objective(loss, mixing.outputs(alpha, shared, personal), batch)

    def gradients(here: Variables, batch: Batch) -> Variables:
        of_shared = gradient(loss)(here.shared, batch)
        shared = trees.subtract(here.shared, trees.scale(rate, of_shared))
        by_shared, by_personal = jax.grad(ensemble_loss, (0, 1))(
            shared, here.personal, here.alpha, batch
        )
        personal = trees.subtract(here.personal, trees.scale(rate, by_personal))
        twice = mixing.parameters(here.alpha, by_shared, by_personal)
        products = jax.tree.map(jnp.vdot, trees.subtract(shared, personal), twice)
        of_alpha = sum(jax.tree.leaves(products)) - SHRINKAGE * (1 - here.alpha)
        return Variables(of_shared, by_personal, of_alpha.astype(here.alpha.dtype))

    def enroll(params, shard, key):
        del key
        return (), ApflClient(params, client_entry(alpha, shard), params)

    def client(down, client, shard, key):
        up, reached = _round(gradients, work, learn, down, client, shard, key)
        return up, ApflClient(reached.personal, reached.alpha, reached.shared)

    def personal(down, client, shard, key):
        del down, shard, key
        return mixing.outputs(client.alpha, client.last, client.personal)

    inner = fedavg(loss, work)
    return inner._replace(
        enroll=enroll,
        client=client,
        personal=personal,
        info=lambda client: {"alpha": client.alpha},
        needs=inner.needs._replace(weights="uniform"),
    )


@gate()
def apfl_fedjax(loss: Loss, work: Work, *, alpha: Alpha) -> Algorithm:
    """APFL as in FedJAX; arguments as of ``fb.apfl``."""

    def mix(alphas, shared, personal):
        return jax.tree.map(mixing.parameters, alphas, shared, personal)

    def mixture_loss(alphas, here: Variables, batch: Batch):
        return objective(loss, mix(alphas, here.shared, here.personal), batch)

    def gradients(here: Variables, batch: Batch) -> Variables:
        mixture = mix(here.alpha, here.shared, here.personal)
        return Variables(
            gradient(loss)(here.shared, batch),
            gradient(loss)(mixture, batch),
            jax.grad(mixture_loss)(here.alpha, here, batch),
        )

    def enroll(params, shard, key):
        del key
        alphas = jax.tree.map(lambda leaf: client_entry(alpha, shard), params)
        return (), ApflClient(params, alphas)

    def client(down, client, shard, key):
        up, reached = _round(gradients, work, "step", down, client, shard, key)
        return up, ApflClient(reached.personal, reached.alpha)

    def personal(down, client, shard, key):
        del shard, key
        return mix(client.alpha, down.shared, client.personal)

    def info(client):
        return {"alpha": jnp.stack(jax.tree.leaves(client.alpha)).mean()}

    return fedavg(loss, work)._replace(
        enroll=enroll, client=client, personal=personal, info=info
    )


def _round(
    gradients: Gradients,
    work: Work,
    learn: Learn,
    down: Down,
    client: ApflClient,
    shard: Shard,
    key: Key,
) -> tuple[Up, Variables]:
    """A client's answer to the server, and its variables after the local steps."""
    start = Variables(down.shared, client.personal, client.alpha)
    reached, mean, rows = local_steps(
        gradients, start, down, shard, key, work=work, learning=Learning(learn)
    )
    delta = trees.subtract(reached.shared, down.shared)
    step_sum = step_sum_of(work, rows, down.round)
    return Up(delta, mean.shared, step_sum=step_sum), reached

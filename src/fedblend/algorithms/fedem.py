# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedEM: several shared models, mixed by every client with weights of its own.

The data of client i are a mixture of M distributions, each of which one shared model
explains; only the weights w_i differ by client. The problem, for a loss that is minus a
log likelihood::

    min over theta_1 .. theta_M, w_1 .. w_n of
        - sum over all rows of log sum_m w_im exp(-loss(theta_m, row))

A round is a step of expectation maximization, for every client i of the cohort::

    q_m(row) <- w_im exp(-loss(theta_m, row)) / sum over m of the same
    w_im     <- mean over its rows of q_m(row)
    t_m      <- theta_m, then steps times, for all m on one batch:
                    t_m <- t_m - rate * grad in t_m of mean of q_m(row) loss(t_m, row)
    theta_m  <- sum_i p_i t_m

    personal_i = sum_m w_im prediction of theta_m,  w_i after one more such step

Parameters are those of ``models.ensemble``; the weights stay with the client, and only
the models travel. The gradient carries the responsibilities q, so that the server takes
the plain weighted mean, as Algorithm 1 does: a client that hardly uses a model hardly
moves it. An ensemble of one model is FedAvg. Where all rows of a client are of one
model, its update is that of ``hypcluster``, whose server divides by the weight of those
that chose the model.

Where this differs from the paper: a client deploys weights of the newest models, by one
more step; the paper's are those of the client's last round. Models are trained on the
same batches, not one after another on different ones. A penalty in the loss enters q.

Reference: Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a
mixture of distributions", NeurIPS 2021, arXiv:2108.10252.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.batches import everything
from fedblend.core import Algorithm, Batch, Loss, Wire, start_with_params
from fedblend.local import Work, local_update
from fedblend.losses import gradient, row_losses
from fedblend.models.derived import (
    models_only,
    require_ensemble,
    set_weights,
    single_loss,
)
from fedblend.registry import NewClient, algorithm


class FedEmClient(NamedTuple):
    """The state of a client: its weights of the models, which sum to 1."""

    weights: jax.Array


@algorithm(form="ensemble", new_client=NewClient(visits=10, steps=None), reads="losses")
def fedem(loss: Loss, work: Work) -> Algorithm:
    """Shared models, and weights of them for each client, by expectation maximization.

    Args:
        loss: ``loss(params, rows) -> losses[rows]`` of ``models.ensemble``.
        work: local work of a round, on all models at once.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.ones((8, 1)), jnp.repeat(jnp.arange(2), 4)
        >>> data = fb.federate(rows, [[0, 1, 2, 3], [4, 5, 6, 7]])
        >>> model = fb.models.ensemble(fb.models.softmax(1, 2), 2)
        >>> loss = fb.losses.cross_entropy(model.apply)
        >>> algorithm = fb.algorithms.fedem(loss, fb.Work(1.0, 5, batch_size=None))
        >>> run = fb.simulate(algorithm, model.init, data, jax.random.key(0), rounds=40)
        >>> run = run.complete()
        >>> [bool(run.client(i).weights.max() > 0.95) for i in (0, 1)]
        [True, True]
    """
    own_loss = single_loss(loss)
    losses_of_each = jax.vmap(
        lambda model, batch: row_losses(own_loss, model, batch), (0, None)
    )

    def expect(models, weights, shard):
        """The client's rows with q, as a shard, and the weights that follow."""
        rows, mask = everything(shard)[:2]
        assert mask is not None
        prior = jnp.log(jnp.maximum(weights, jnp.finfo(weights.dtype).tiny))
        scores = prior[None] - losses_of_each(models, Batch(rows)).T
        # A model that diverged explains no row.
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        q = jax.nn.softmax(scores, axis=1).astype(weights.dtype)  # [rows, models]
        total = jnp.where(mask[:, None], q, 0).sum(axis=0)
        after = total / jnp.maximum(shard.count, 1).astype(total.dtype)
        start = jnp.zeros_like(shard.start)
        window = dataclasses.replace(shard, examples=(rows, q), start=start)
        return window, jnp.where(shard.count > 0, after, weights)

    def surrogate(shared, rows, key, mask):
        rows, q = rows
        batch = Batch(rows, mask, key=key)
        return (q.T * losses_of_each(shared.models, batch)).sum(axis=0)

    def enroll(params, shard, key):
        number = require_ensemble("fedem: params", params)
        return (), FedEmClient(jnp.full(number, 1 / number, params.log_weights.dtype))

    def client(down, client, shard, key):
        down = tell(down, ())
        window, weights = expect(down.shared.models, client.weights, shard)
        up = local_update(gradient(surrogate), down, window, key, work=work)
        return up, FedEmClient(weights)

    def server(aggregate, down, server, central, key):
        shared = trees.add_where_given(down.shared, aggregate.mean.delta)
        return down._replace(shared=shared), server

    def personal(down, client, shard, key):
        models = down.shared.models
        return set_weights(models, expect(models, client.weights, shard)[1])

    def tell(down, request):
        shared, correction = map(models_only, (down.shared, down.correction))
        return down._replace(shared=shared, correction=correction)

    def info(client):
        return {f"weight {m}": weight for m, weight in enumerate(client.weights)}

    return Algorithm(
        enroll,
        start_with_params,
        client,
        server,
        personal,
        wire=Wire(tell=tell),
        info=info,
    )

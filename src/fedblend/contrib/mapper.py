# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""MAPPER: a shared model, personal models and their mixing weights, all learned.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

The problem is ``min over shared, y_i, alpha_i of mean_i f_i(mix(alpha_i, shared,
y_i))``. On training rows alpha_i = 0 does as well as any, so that it is chosen on rows
that the client holds out. A round, for every client i of the cohort::

    y_i(a)  <- y_i, steps times: y <- y - rate * grad_y f_i(mix(a, shared, y))
               for each a of a grid over [0, 1]
    alpha_i <- the a for which mix(a, shared, y_i(a)) is best on the held-out rows
    y_i     <- y_i(alpha_i)
    z_i     <- shared, steps times: z <- z - rate * grad_z f_i(mix(alpha_i, z, y_i))
    shared  <- shared + mean (z_i - shared)

Without a grid alpha_i stays as it is: at 1 this is FedAvg, at 0 training alone, and in
between every client's mixture tends to its own optimum, whatever ``shared`` is.

A new client gets y_i and its weight, chosen on rows held out of its training rows.

Where this differs from the paper: it mixes predictions (``mix=mixing.outputs``), here
parameters are the default. y_i is fitted by steps from where it was, alpha_i by a grid.
Weights are those of the run. A client with too few rows to hold out keeps alpha_i.

Reference: Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with
applications to federated learning", 2020, arXiv:2002.10619.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, mixing, trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.batches import client_entry, everything, part
from fedblend.checks import Alpha, Part, Whole
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.errors import UserError
from fedblend.local import Work, descend, local_update
from fedblend.losses import objective
from fedblend.mixing import Mixing
from fedblend.registry import algorithm


class MapperClient(NamedTuple):
    """The state of a client: its own model y_i, and alpha_i."""

    personal: PyTree
    alpha: jax.Array


@algorithm(reads="losses")
def mapper(
    loss: Loss,
    work: Work,
    *,
    alpha: Alpha = 0.5,
    grid: Whole = 11,
    held_out: Part = 0.2,
    mix: Mixing = mixing.parameters,
) -> Algorithm:
    """A mixture of a shared and a personal model, weighted on held-out rows.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``; takes what ``mix`` makes.
        work: local work of a round on either model: optimizer, steps, batch size.
        alpha: first weight of the shared model; a number, or an array over clients.
        grid: number of weights from 0 to 1 to try, at least 2; 0 keeps alpha.
        held_out: fraction of a client's training rows on which alpha is chosen.
        mix: ``mixing.parameters``, ``mixing.outputs`` or ``mixing.products``; names of
            parts of the model, such as ["last"], to mix these alone.
    """
    if grid == 1:
        raise UserError(
            "mapper: grid",
            grid,
            "a number of weights, 2 or more, nor 0, which keeps alpha",
        )
    if held_out == 0 < grid:
        raise UserError(
            "mapper: held_out",
            held_out,
            "in (0, 1), which a grid needs; grid=0 needs none",
        )

    def mean_loss(shared, own, weight, batch):
        return objective(loss, mix(weight, shared, own), batch)

    def enroll(params, shard, key):
        return (), MapperClient(params, client_entry(alpha, shard))

    def client(down, client, shard, key):
        seen, unseen = part(shard, held_out, 1.0), part(shard, 0.0, held_out)

        def try_weight(weight):
            own, _ = descend(
                lambda here, batch: jax.grad(mean_loss, 1)(
                    down.shared, here, weight, batch
                ),
                client.personal,
                seen,
                keys.named(key, "mapper"),
                work=work,
                round=down.round,
            )
            return own, mean_loss(down.shared, own, weight, everything(unseen))

        weights = client.alpha[None]
        if grid:
            weights = jnp.linspace(0, 1, grid, dtype=client.alpha.dtype)
            weights = jnp.where(unseen.count > 0, weights, client.alpha)
        models, scores = jax.lax.map(try_weight, weights)
        best = jnp.argmin(jnp.where(jnp.isnan(scores), jnp.inf, scores))
        own, weight = trees.take((models, weights), best)

        def direction(here, batch):
            return jax.grad(mean_loss)(here, own, weight, batch)

        up = local_update(direction, down, seen, key, work=work)
        return up, MapperClient(own, weight)

    def personal(down, client, shard, key):
        return mix(client.alpha, down.shared, client.personal)

    return fedavg(loss, work)._replace(
        enroll=enroll,
        client=client,
        personal=personal,
        info=lambda client: {"alpha": client.alpha},
    )

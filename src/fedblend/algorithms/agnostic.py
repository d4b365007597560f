# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Agnostic FL: the model with the smallest loss on the worst mixture of clients.

The problem is ``min over shared, max over q in the simplex of sum_i q_i f_i(shared)``;
at the optimum the clients with q_i > 0 have the same loss, and no other a larger one. A
round, with n clients of which the cohort is a random part::

    y_i    <- shared, then steps times:  y_i <- y_i - rate * grad f_i(y_i; batch)
    shared <- shared + mean n q_i (y_i - shared)
    q      <- projection on the simplex of  q + q_rate * mean n f_i(shared) e_i

with f_i at the old ``shared``, e_i the i-th unit vector, and q uniform at first. Over
random cohorts both means are unbiased; with one step they are the problem's gradients.

The server sends each client its own q_i only. A client sends its loss as one number,
which the server, who knows the sender, decodes as ``n f_i e_i``: 32 bits, however many
clients there are. (Under secure aggregation clients would have to send the vector.)

Where this differs from the paper: the last iterate is used, not the mean of all; q
ranges over the whole simplex; there may be several local steps, weighted together by n
q_i; the batch of f_i is another one than the gradient's.

Reference: Mohri, Sivek, Suresh, "Agnostic federated learning", ICML 2019,
arXiv:1902.00146.
"""

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.batches import draw
from fedblend.checks import Count, NotNegative
from fedblend.core import Algorithm, Loss, Up, Wire
from fedblend.local import Work
from fedblend.losses import objective
from fedblend.registry import algorithm


def onto_simplex(vector: jax.Array) -> jax.Array:
    """The nearest point with entries of at least 0 that add up to 1.

    It is ``max(vector - shift, 0)``; the entries that stay above 0 are the largest.
    """
    falling = jnp.sort(vector)[::-1]
    excess = jnp.cumsum(falling) - 1
    number = jnp.arange(1, len(vector) + 1, dtype=vector.dtype)
    stay = (falling * number > excess).sum()
    shift = excess[stay - 1] / stay.astype(vector.dtype)
    return jnp.maximum(vector - shift, 0)


@algorithm(sends=("update", "losses"), reads="losses")
def agnostic(
    loss: Loss, work: Work, *, clients: Count, q_rate: NotNegative
) -> Algorithm:
    """Descent in the model, ascent in the weights of the clients.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        clients: number of clients.
        q_rate: step of the ascent in q, 0 or more.
    """
    inner = fedavg(loss, work)
    return weigh_losses(
        inner, loss, clients=clients, q_rate=q_rate, batch_size=work.batch_size
    )


def weigh_losses(
    inner: Algorithm, loss: Loss, *, clients: int, q_rate: float, batch_size: int | None
) -> Algorithm:
    """An algorithm with FedAvg's messages, whose updates are weighted by n q_i.

    ``inner`` does the local work; the other arguments are those of ``agnostic``.
    """

    def start(params, joins, central, key):
        down, server = inner.start(params, joins, central, key)
        uniform = jnp.full((clients,), 1 / clients, jnp.result_type(float))
        return down._replace(extra=down.extra | {"agnostic": uniform}), server

    def tell(down, request):
        own = down.extra["agnostic"][request]
        return down._replace(extra=down.extra | {"agnostic": own})

    def client(down, client, shard, key):
        own = keys.named(key, "agnostic")
        batch = draw(shard, own, batch_size)
        value = objective(loss, down.shared, batch)
        up, client = inner.client(down, client, shard, key)
        delta, mean_gradient = trees.scale(
            clients * down.extra["agnostic"], (up.delta, up.mean_gradient)
        )
        return Up(delta, mean_gradient, up.extra | {"agnostic": value}), client

    def decode(up, sender):
        value = up.extra["agnostic"]
        losses = jnp.zeros((clients,), value.dtype).at[sender.id].set(clients * value)
        return up._replace(extra=up.extra | {"agnostic": losses})

    def server(aggregate, down, server, central, key):
        weights, losses = down.extra["agnostic"], aggregate.mean.extra["agnostic"]
        climbed = onto_simplex(weights + q_rate * losses.astype(weights.dtype))
        down, server = inner.server(aggregate, down, server, central, key)
        return down._replace(extra=down.extra | {"agnostic": climbed}), server

    needs = inner.needs._replace(
        mean=True, uniform=True, weights="uniform", clients=clients
    )
    return inner._replace(
        start=start,
        client=client,
        server=server,
        wire=Wire(lambda client, shard: shard.id, tell, decode),
        needs=needs,
    )

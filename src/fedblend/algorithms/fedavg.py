# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedAvg: clients take local steps, the server averages them.

The problem is ``min over shared of sum_i p_i f_i(shared)``. A round, for every client i
of the cohort::

    y_i   <- shared, then steps times:  y_i <- y_i - rate * grad f_i(y_i; batch)
    delta <- sum_i p_i (y_i - shared) / sum_i p_i
    shared <- shared + delta

Where this differs from the paper: it does not, with ``Epochs`` and weights by_count.
Steps may also be counted instead of epochs, the local optimizer may be any of optax's
(restarted every round), and with ``batch_size=None`` and ``steps=1`` it is
distributed gradient descent.

Reference: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient
learning of deep networks from decentralized data", AISTATS 2017, arXiv:1602.05629.
"""

from functools import partial

from fedblend import trees
from fedblend.core import Algorithm, Loss, Needs, no_state, start_with_params
from fedblend.local import Work, local_update, step_sum_of
from fedblend.losses import gradient
from fedblend.registry import algorithm


@algorithm()
def fedavg(loss: Loss, work: Work) -> Algorithm:
    """Local steps at every client, averaged.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, optimum = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.fedavg(
        ...     fb.datasets.quadratic_loss, fb.Work(0.1, steps=1, batch_size=None)
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=200)
        >>> bool(jnp.allclose(run.complete().shared, optimum, atol=1e-4))
        True
    """
    train = partial(local_update, gradient(loss), work=work)

    def client(down, client, shard, key):
        up = train(down, shard, key)
        return up._replace(step_sum=step_sum_of(work, shard, down.round)), client

    def server(aggregate, down, server, central, key):
        shared = trees.add(down.shared, aggregate.mean.delta)
        return down._replace(shared=shared), server

    return Algorithm(no_state, start_with_params, client, server, needs=Needs(gain=1.0))

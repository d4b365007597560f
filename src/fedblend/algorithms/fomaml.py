# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FOMAML: a shared model that is good after a few local steps.

The problem is ``min over shared of sum_i p_i f_i(y_i(shared))``, where y_i is shared
after inner steps on f_i. Its gradient is taken as if ``y_i' = I``: no second
derivatives. A round, for every client i of the cohort::

    y_i    <- shared, then steps times:  y_i <- y_i - rate * grad f_i(y_i; batch)
    g_i    <- grad f_i(y_i; a fresh batch)
    shared <- ServerOpt(shared, sum_i p_i g_i / sum_i p_i)

    personal_i <- shared, then the same inner steps on f_i

Where this differs from the paper: tasks are clients, which come in cohorts, and their
weights are the run's (the paper's are equal: ``weights="uniform"``). The batch of g_i
is drawn afresh from all of the client's rows, so it may share rows with the inner ones;
the paper draws both for every task, and with ``batch_size=None`` both are everything
the client has. With no inner steps it is distributed SGD. Message and server are those
of FedOpt, with ``delta = -g_i``.

In federated learning: Jiang, Konečný, Rush, Kannan, "Improving federated learning
personalization via model agnostic meta learning", 2019, arXiv:1909.12488.

Reference: Finn, Abbeel, Levine, "Model-agnostic meta-learning for fast adaptation of
deep networks", ICML 2017, arXiv:1703.03400.
"""

from functools import partial

from fedblend import keys, trees
from fedblend.algorithms.fedopt import fedopt
from fedblend.algorithms.finetune import finetune
from fedblend.batch_statistics import refuse_statistics
from fedblend.batches import draw
from fedblend.core import Algorithm, Loss, Up
from fedblend.local import ServerOptimizer, WorkOrNone, descend
from fedblend.losses import gradient
from fedblend.registry import ADAPTS, algorithm


@algorithm(keys={"server_optimizer": "server"}, new_client=ADAPTS)
def fomaml(
    loss: Loss,
    work: WorkOrNone,
    server_optimizer: ServerOptimizer,
) -> Algorithm:
    """Train by the gradients after local steps; deploy the model after local steps.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the inner steps, in training and before use; there may be 0 of them.
            Its batch size is also that of the last gradient.
        server_optimizer: optimizer of the server, a number for plain steps; its state
            lasts over the rounds.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.algorithms.fomaml(
        ...     fb.datasets.quadratic_loss, fb.Work(0.05, steps=1, batch_size=None), 0.1
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=50).complete()
        >>> measured = fb.metrics.mean_loss(fb.datasets.quadratic_loss)
        >>> own = fb.Batch(federation.train.rows(0))
        >>> bool(measured(run.personal(0), own) < measured(run.shared, own))
        True
    """
    train = partial(descend, gradient(loss), work=work)

    def client(down, client, shard, key):
        refuse_statistics("fomaml", down.shared)
        reached, _ = train(
            down.shared, shard, key, round=down.round, correction=down.correction
        )
        fresh = draw(shard, keys.named(key, "fomaml"), work.batch_size)
        own = keys.named(key, "fomaml loss")
        mean_gradient = gradient(loss)(reached, fresh._replace(key=own))
        push = trees.add_where_given(mean_gradient, down.correction)
        return Up(trees.scale(-1, push), mean_gradient), client

    # FedOpt's server; its clients' steps are not taken.
    trained = fedopt(loss, work._replace(steps=1), server_optimizer)
    return finetune(trained._replace(client=client), loss, work)

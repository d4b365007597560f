# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Reptile: the shared model moves toward the models after local steps.

It is meant as a good place to start from: what a client deploys is that model after
its own inner steps. A round, for every client i of the cohort::

    y_i    <- shared, then steps times:  y_i <- y_i - rate * grad f_i(y_i; batch)
    delta  <- sum_i p_i (y_i - shared) / sum_i p_i
    shared <- ServerOpt(shared, -delta);  with a rate: shared + server_rate * delta

    personal_i <- shared, then the same inner steps on f_i

Training is FedOpt's, and FedAvg's with a server rate of 1; what Reptile adds is the
reading as meta-learning, and so the model that is deployed.

Where this differs from the paper: tasks are clients, which come in cohorts (the
paper's batched version), and their weights are those of the run (the paper's are equal:
``weights="uniform"``). Its server takes plain steps whose rate falls to 0 over the
rounds (``optax.sgd`` with a schedule); here it may be any of optax's. The inner
optimizer restarts with every client; the paper's experiments keep Adam's moments.

As a reading of FedAvg: Jiang, Konečný, Rush, Kannan, "Improving federated learning
personalization via model agnostic meta learning", 2019, arXiv:1909.12488.

Reference: Nichol, Achiam, Schulman, "On first-order meta-learning algorithms", 2018,
arXiv:1803.02999.
"""

from fedblend.algorithms.fedopt import fedopt
from fedblend.algorithms.finetune import finetune
from fedblend.core import Algorithm, Loss
from fedblend.local import ServerOptimizer, Work
from fedblend.registry import ADAPTS, algorithm


@algorithm(keys={"server_optimizer": "server"}, new_client=ADAPTS)
def reptile(
    loss: Loss,
    work: Work,
    server_optimizer: ServerOptimizer,
) -> Algorithm:
    """FedOpt, deployed after local steps; ``reptile(.., 1.0)`` trains as FedAvg does.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the inner steps, in training and before use.
        server_optimizer: optimizer of the server; a number is the fraction of the way
            to the clients' mean (the paper's epsilon), above 0.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> federation, _ = fb.datasets.quadratics(clients=4, dim=2)
        >>> algorithm = fb.algorithms.reptile(
        ...     fb.datasets.quadratic_loss, fb.Work(0.05, steps=5, batch_size=None), 0.5
        ... )
        >>> run = fb.simulate(algorithm, jnp.zeros(2), federation, jax.random.key(0),
        ...                   rounds=50).complete()
        >>> measured = fb.metrics.mean_loss(fb.datasets.quadratic_loss)
        >>> own = fb.Batch(federation.train.rows(0))
        >>> bool(measured(run.personal(0), own) < measured(run.shared, own))
        True
    """
    return finetune(fedopt(loss, work, server_optimizer), loss, work)

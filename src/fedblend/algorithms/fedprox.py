# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedProx: FedAvg whose local steps are held near the shared model.

A round, for every client i of the cohort::

    y_i <- approximate minimizer of f_i(y) + mu/2 |y - shared|^2, from y = shared
    shared <- shared + weighted mean of (y_i - shared)

Where this differs from the paper: the minimizer is approximated by the local steps
given, the same for all clients unless they are an array; the paper's inexactness
gamma_i is what they leave. Weights are those of the run (the paper samples clients by
their size and averages uniformly).

Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in
heterogeneous networks", MLSys 2020, arXiv:1812.06127.
"""

from functools import partial

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import NotNegative
from fedblend.core import Algorithm, Loss
from fedblend.local import Work, local_update
from fedblend.losses import gradient
from fedblend.registry import algorithm


@algorithm()
def fedprox(loss: Loss, work: Work, *, mu: NotNegative) -> Algorithm:
    """FedAvg with a proximal term; ``fedprox(.., mu=0)`` is FedAvg.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        mu: strength of the pull toward the shared model, 0 or more.
    """
    train = partial(local_update, gradient(loss), work=work)

    def client(down, client, shard, key):
        def pull(params):
            return 0.5 * mu * trees.sum_squares(trees.subtract(params, down.shared))

        return train(down, shard, key, penalty=pull), client

    return fedavg(loss, work)._replace(client=client)

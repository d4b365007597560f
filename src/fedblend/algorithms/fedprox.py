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
from fedblend.checks import NOT_NEGATIVE, gate
from fedblend.core import Algorithm, Loss, Up
from fedblend.local import WORK, Work, descend
from fedblend.losses import gradient
from fedblend.registry import algorithm


@algorithm()
@gate(**WORK, mu=NOT_NEGATIVE)
def fedprox(
    loss: Loss,
    work: Work,
    *,
    mu: float,
) -> Algorithm:
    """FedAvg with a proximal term; ``fedprox(.., mu=0)`` is FedAvg.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        mu: strength of the pull toward the shared model, >= 0.
    """
    train = partial(
        descend,
        gradient(loss),
        work=work,
    )

    def client(down, client, shard, key):
        def pull(params):
            return 0.5 * mu * trees.squared_norm(trees.subtract(params, down.shared))

        reached, mean_gradient = train(
            down.shared,
            shard,
            key,
            round=down.round,
            correction=down.correction,
            penalty=pull,
        )
        return Up(trees.subtract(reached, down.shared), mean_gradient), client

    inner = fedavg(loss, work)
    return inner._replace(client=client)

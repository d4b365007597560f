# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedOpt: the clients' mean step as a gradient for any optimizer at the server.

A round::

    delta  <- weighted mean of the clients' steps, as in FedAvg
    shared <- ServerOpt(shared, -delta)

With ``optax.adam``, ``optax.yogi`` and ``optax.adagrad`` these are FedAdam, FedYogi
and FedAdagrad; with ``optax.sgd(rate, momentum)`` it is FedAvgM.

Where this differs from the paper: optax corrects the bias of Adam's moments, which
the paper's algorithm leaves out, and adds epsilon inside the square root only through
``eps_root``; the paper's tau is optax's ``eps``. Nothing else does.

Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive
federated optimization", ICLR 2021, arXiv:2003.00295.
"""

from typing import NamedTuple

import optax

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import gate
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.local import OPTIMIZER, WORK, Optimizer, Steps, resolve


class FedOptServer(NamedTuple):
    """What the server remembers."""

    optimizer: PyTree


@gate(**WORK, server_optimizer=OPTIMIZER)
def fedopt(
    loss: Loss,
    optimizer: Optimizer,
    server_optimizer: float | optax.GradientTransformation,
    *,
    steps: Steps,
    batch_size: int | None,
) -> Algorithm:
    """FedAvg with an optimizer at the server; ``fedopt(.., 1.0)`` is FedAvg.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        optimizer: of the clients; a number is plain SGD with that rate.
        server_optimizer: of the server, its state kept over the rounds; schedules
            inside it count rounds.
        steps: local steps of a round, an array of them over clients, or ``Epochs``.
        batch_size: rows of a step, or None for all of them.
    """
    inner = fedavg(loss, optimizer, steps=steps, batch_size=batch_size)
    transform = resolve(server_optimizer, 0, 1)

    def start(params, joins, central, key):
        down, _ = inner.start(params, joins, central, key)
        return down, FedOptServer(transform.init(params))

    def server(aggregate, down, server, central, key):
        del central, key
        ascent = trees.scale(-1, aggregate.mean.delta)
        updates, state = transform.update(ascent, server.optimizer, down.shared)
        shared = optax.apply_updates(down.shared, updates)
        return down._replace(shared=shared), FedOptServer(state)

    return inner._replace(start=start, server=server)

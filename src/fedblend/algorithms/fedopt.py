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

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.batch_statistics import take_step
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.local import ServerOptimizer, Work, resolve
from fedblend.registry import algorithm


class FedOptServer(NamedTuple):
    """The state of the server: that of its optimizer."""

    optimizer: PyTree


@algorithm(
    keys={"server_optimizer": "server"},
    defaults={"server": {"name": "adam", "rate": 0.01}},
)
def fedopt(
    loss: Loss,
    work: Work,
    server_optimizer: ServerOptimizer,
) -> Algorithm:
    """FedAvg with an optimizer at the server; ``fedopt(.., 1.0)`` is FedAvg.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        server_optimizer: optimizer of the server, a number for plain steps; its
            state lasts over the rounds, and schedules inside it count rounds.
    """
    inner = fedavg(loss, work)
    transform = resolve(server_optimizer, 0, 1)

    def start(params, joins, central, key):
        down, _ = inner.start(params, joins, central, key)
        return down, FedOptServer(transform.init(params))

    def server(aggregate, down, server, central, key):
        ascent = trees.scale(-1, aggregate.mean.delta)
        shared, state = take_step(
            transform, ascent, server.optimizer, down.shared, ascent, momentum=1.0
        )
        return down._replace(shared=shared), FedOptServer(state)

    rate = server_optimizer if isinstance(server_optimizer, int | float) else 0.0
    needs = inner.needs._replace(gain=float(rate) if rate > 0 else None)
    return inner._replace(start=start, server=server, needs=needs)

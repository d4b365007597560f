# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: FedAvg with control variates against client drift.

A round, with the server's control c (sent along) and each client's own c_i::

    y_i  <- shared, then steps times:  y_i <- y_i - rate * (grad f_i(y_i) - c_i + c)
    c_i' <- mean of the raw gradients grad f_i(y_i) over these steps
    shared <- shared + server_rate * mean (y_i - shared)
    c      <- c + p * mean (c_i' - c_i),      p = received weight / all weight

Where this differs from the paper: its option II, ``c_i' = c_i - c + (shared - y_i) /
(steps * rate)``, is just the mean of the raw gradients when the steps are plain SGD;
written as that mean it holds for any local optimizer and schedule. Weights are the
simulation's: with uniform ones p is the paper's |S|/N.

Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic
controlled averaging for federated learning", ICML 2020, arXiv:1910.06378.
"""

from functools import partial
from typing import NamedTuple

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import Positive
from fedblend.core import Algorithm, Loss, Needs, PyTree
from fedblend.local import Work, local_update
from fedblend.losses import gradient
from fedblend.registry import algorithm


class ScaffoldClient(NamedTuple):
    """The state of a client: its control variate c_i."""

    control: PyTree


@algorithm(sends=("update", "gradients"))
def scaffold(loss: Loss, work: Work, *, server_rate: Positive = 1.0) -> Algorithm:
    """Local steps corrected by control variates, which both sides send.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
        server_rate: rate of the server, the paper's eta_g; 1 is plain averaging.
    """
    train = partial(local_update, gradient(loss), work=work)
    inner = fedavg(loss, work)

    def enroll(params, shard, key):
        return (), ScaffoldClient(trees.zeros_like(params))

    def start(params, joins, central, key):
        down, server = inner.start(params, joins, central, key)
        return down._replace(extra={"scaffold": trees.zeros_like(params)}), server

    def client(down, client, shard, key):
        correction = trees.subtract(down.extra["scaffold"], client.control)
        correction = trees.add_where_given(correction, down.correction)
        up = train(down._replace(correction=correction), shard, key)
        change = trees.subtract(up.mean_gradient, client.control)
        return up._replace(extra={"scaffold": change}), ScaffoldClient(up.mean_gradient)

    def server(aggregate, down, server, central, key):
        step = trees.scale(server_rate, aggregate.mean.delta)
        change = trees.scale(aggregate.participation, aggregate.mean.extra["scaffold"])
        control = trees.add(down.extra["scaffold"], change)
        extra = down.extra | {"scaffold": control}
        return down._replace(shared=trees.add(down.shared, step), extra=extra), server

    needs = Needs(mean=True, memories=True, gain=server_rate)
    return Algorithm(enroll, start, client, server, needs=needs)

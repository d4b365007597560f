# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""RoLoRA: one factor of an adapter is trained in a round, and the other is common.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

The change of a weight is B A. The mean of the clients' products is the product with the
mean of one factor where all clients have the same other one, so that rounds take turns,
from round 0 on::

    even rounds   B_i <- B, then steps times:  B_i <- B_i - rate * grad in B f_i(B_i A)
                  B   <- sum_i p_i B_i,        and mean of B_i A = B A
    odd rounds    A_i <- A, then steps times:  A_i <- A_i - rate * grad in A f_i(B A_i)
                  A   <- sum_i p_i A_i,        and mean of B A_i = B A

B goes first: it starts at zero, where the gradient in A is zero.

The server moves the factor of the round alone: noise of privacy, or the error of a
compressor, leaves the other one where it is.

A new client gets the shared adapter; ``finetune`` around it fits that to the client.

Where this differs from the paper: messages have a place for both factors, zeros for the
one that rests, and are counted so; the paper sends the trained factor only. p_i are the
weights of the run, by rows unless it sets others; the paper's are equal. Any optimizer
is allowed, restarted in every round. Parameters that are no factor of a product are
trained in every round.

Reference: Chen, Guo, Ju, Dalal, Zhu, Khisti, "Robust federated finetuning of LLMs via
alternating optimization of LoRA", NeurIPS 2025, arXiv:2502.01755.
"""

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import PATHS, require_parts
from fedblend.core import Algorithm, Loss, PyTree
from fedblend.local import Work, local_update
from fedblend.losses import gradient
from fedblend.registry import algorithm

FACTORS = PATHS("rolora: params", ["*/b", "*/a"])


def alternate(round: jax.Array, tree: PyTree, other: PyTree) -> PyTree:
    """``tree`` at what is trained in a round, else ``other``."""

    def choose(path, ours, theirs):
        if not FACTORS(path):
            return ours
        turn = ("b", "a").index(path[-1])
        return jnp.where(round % 2 == turn, ours, theirs)

    return trees.map_with_path(choose, tree, other)


def mask_round(round: jax.Array, change: PyTree) -> PyTree:
    """A change of what is trained in a round, zeros for what rests."""
    return alternate(round, change, trees.zeros_like(change))


@algorithm(form="factors")
def rolora(loss: Loss, work: Work) -> Algorithm:
    """FedAvg on one factor of every adapter at a time, B in even rounds, A in odd ones.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``, of a model with ``lora`` adapters.
        work: local work of a round: optimizer, steps, batch size.
    """
    inner = fedavg(loss, work)

    def enroll(params, shard, key):
        require_parts(FACTORS, params)
        return inner.enroll(params, shard, key)

    def client(down, client, shard, key):
        def direction(here, batch):
            at = alternate(down.round, here, down.shared)
            return mask_round(down.round, gradient(loss)(at, batch))

        up = local_update(direction, down, shard, key, work=work)
        return up._replace(delta=mask_round(down.round, up.delta)), client

    def server(aggregate, down, server, central, key):
        mean = aggregate.mean._replace(
            delta=mask_round(down.round, aggregate.mean.delta)
        )
        aggregate = aggregate._replace(mean=mean)
        return inner.server(aggregate, down, server, central, key)

    needs = inner.needs._replace(turns=True)
    return inner._replace(enroll=enroll, client=client, server=server, needs=needs)

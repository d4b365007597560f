# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""RoLoRA: one factor of an adapter is trained in a round, and the other is common.

The change of a weight is B A. The mean of the clients' products is the product with the
mean of one factor where all clients have the same other one, so that rounds take turns,
from round 0 on::

    even rounds   B_i <- B, then steps times:  B_i <- B_i - rate * grad in B f_i(B_i A)
                  B   <- sum_i p_i B_i,        and mean of B_i A = B A
    odd rounds    A_i <- A, then steps times:  A_i <- A_i - rate * grad in A f_i(B A_i)
                  A   <- sum_i p_i A_i,        and mean of B A_i = B A

B goes first: it starts at zero, where the gradient in A is zero.

Where this differs from the paper: messages have a place for both factors, zeros for the
one that has not its turn, and are counted so; the paper sends the other half only. Any
optimizer is allowed, restarted in every round. Parameters that are no factor of a
product are trained in every round.

Reference: Chen, Guo, Ju, Dalal, Zhu, Khisti, "Robust federated finetuning of LLMs via
alternating optimization of LoRA", NeurIPS 2025, arXiv:2502.01755.
"""

import jax.numpy as jnp

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.checks import PATHS, gate, require_parts
from fedblend.core import Algorithm, Loss
from fedblend.local import WORK, Work, local_update
from fedblend.losses import gradient
from fedblend.registry import algorithm

FACTORS = PATHS("rolora: params", ["*/b", "*/a"])


@algorithm(form="factors")
@gate(**WORK)
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
        def in_turn(tree, other):
            """``tree`` at what is trained in this round, else ``other``."""

            def choose(path, ours, theirs):
                if not FACTORS(path):
                    return ours
                turn = ("b", "a").index(path[-1])
                return jnp.where(down.round % 2 == turn, ours, theirs)

            return trees.map_with_path(choose, tree, other)

        def direction(here, batch):
            found = gradient(loss)(in_turn(here, down.shared), batch)
            return in_turn(found, trees.zeros_like(found))

        up = local_update(direction, down, shard, key, work=work)
        return up._replace(delta=in_turn(up.delta, trees.zeros_like(up.delta))), client

    return inner._replace(enroll=enroll, client=client)

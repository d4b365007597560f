# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedALA: a client starts each round between its own model and the shared one.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

Where between them is learned, for each entry of the top layers (the head) by itself, on
a part of the client's rows. A round, for every client i of the cohort, with ``gap =
shared - own_i``::

    start_i = own_i + gap * W_i                 W_i in [0, 1]; 1 below the head
    W_i    <- passes over the part:  W_i <- clip(W_i - weight_rate * grad in W_i of
              f_i(start_i; batch), 0, 1)
    own_i  <- start_i, then steps times:  own_i <- own_i - rate * grad f_i(own_i; batch)
    shared <- shared + sum_i p_i (own_i - shared)

    personal_i = own_i

W_i starts at 1. In the first round in which own_i and the shared model differ there are
passes until no weight moves by more than ``SETTLED`` in a pass, at most ``most`` of
them; afterwards one in a round. Autodiff writes the gradient, which is that of f_i in
the start times the gap. With ``weight_rate = 0`` clients are those of FedAvg; weights
of 0 everywhere would be training alone.

A new client takes one round from the shared model, with weights of its own.

Where this differs from the paper: it draws the part of the rows anew in each round,
here it is the same (the first rows, which are in random order). It stops the first
passes when the loss of ten passes varies little. The paper deploys own_i, as here;
PFLlib measures start_i, before the local steps.

Reference: Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: adaptive local aggregation
for personalized federated learning", AAAI 2023, arXiv:2212.01197.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import keys, trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.batch_statistics import refuse_statistics
from fedblend.batches import part
from fedblend.checks import (
    PATHS,
    Count,
    NotNegative,
    Number,
    PartNames,
    require_parts,
)
from fedblend.core import Algorithm, Loss, Needs, PyTree
from fedblend.local import Epochs, Work, descend, local_update
from fedblend.losses import gradient, objective
from fedblend.registry import algorithm

SETTLED = 0.01
"""The change of a weight in a pass below which it counts as settled."""


class FedAlaClient(NamedTuple):
    """The state of a client: its model, W_i (None below the head), if W_i settled."""

    own: PyTree
    weights: PyTree
    settled: jax.Array


def interpolate(weights: PyTree, own: PyTree, shared: PyTree) -> PyTree:
    """``own + weights * (shared - own)``, and ``shared`` where there are no weights."""

    def mix(weight, mine, ours):
        return ours if weight is None else mine + weight * (ours - mine)

    return jax.tree.map(mix, weights, own, shared, is_leaf=lambda node: node is None)


def _clip_step(updates: PyTree, weights: PyTree) -> PyTree:
    return jax.tree.map(lambda step, w: jnp.clip(w + step, 0, 1) - w, updates, weights)


@algorithm()
def fedala(
    loss: Loss,
    work: Work,
    *,
    head: PartNames,
    weight_rate: NotNegative = 1.0,
    learn_on: Annotated[float, Number(above=0, most=1)] = 0.8,
    most: Count = 20,
) -> Algorithm:
    """FedAvg whose clients start between their own model and the shared one.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round; its batch size also serves W_i.
        head: names of the parts of the model whose entries are weighted, such as
            ["last"]; or a function of a path, such as "last/weight".
        weight_rate: rate of the steps on W_i; the paper's is 1.
        learn_on: part of the client's rows on which W_i is learned; the paper's is 0.8.
        most: largest number of passes when W_i is learned first.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> data, _ = fb.datasets.quadratics(clients=4, dim=2, rows=5)
        >>> loss = fb.datasets.quadratic_loss
        >>> work = fb.Work(0.1, steps=2, batch_size=None)
        >>> algorithm = fb.algorithms.fedala(loss, work, head=lambda path: True)
        >>> run = fb.simulate(algorithm, jnp.zeros(2), data, jax.random.key(0),
        ...                   rounds=30).complete()
        >>> bool((run.client(0).weights < 1).any())
        True
    """
    is_head = PATHS("fedala: head", head)
    rule = optax.chain(optax.sgd(weight_rate), optax.stateless(_clip_step))
    one_pass = work._replace(optimizer=rule, steps=Epochs(1))

    def learn(client, shared, shard, key):
        limit = jnp.where(client.settled, 1, most)

        def start_loss(weights, batch):
            return objective(loss, interpolate(weights, client.own, shared), batch)

        def moves(carry):
            return (carry[1] < limit) & (carry[2] > SETTLED)

        def another_pass(carry):
            before, number, _ = carry
            own = jax.random.fold_in(keys.named(key, "fedala"), number)
            after, _ = descend(jax.grad(start_loss), before, shard, own, work=one_pass)
            return after, number + 1, trees.largest(trees.subtract(after, before))

        first = client.weights, jnp.int32(0), jnp.float32(jnp.inf)
        return jax.lax.while_loop(moves, another_pass, first)[0]

    def enroll(params, shard, key):
        require_parts(is_head, params)
        weights = trees.map_with_path(
            lambda path, leaf: jnp.ones_like(leaf) if is_head(path) else None, params
        )
        refuse_statistics("fedala: head", weights)
        return (), FedAlaClient(params, weights, jnp.zeros((), bool))

    def client(down, client, shard, key):
        weights = learn(client, down.shared, part(shard, 0, learn_on), key)
        start = down._replace(shared=interpolate(weights, client.own, down.shared))
        up = local_update(gradient(loss), start, shard, key, work=work)
        reached = trees.add(start.shared, up.delta)
        differs = trees.largest(trees.subtract(down.shared, client.own)) > 0
        state = FedAlaClient(reached, weights, client.settled | differs)
        return up._replace(delta=trees.subtract(reached, down.shared)), state

    def personal(down, client, shard, key):
        return client.own

    # A client sends its own model less the shared one, with all of an error in that.
    return fedavg(loss, work)._replace(
        enroll=enroll, client=client, personal=personal, needs=Needs(feedback="ef21")
    )

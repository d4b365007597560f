# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""CompressedScaffnew: Scaffnew whose clients send a part of their entries each.

The problem is ``min over shared of 1/n sum_i f_i(shared)``. Each client has a model x_i
and a control h_i, at first 0, which sum to 0. All take a step, and one coin for all
says what follows. Masks q_i, of zeros and ones, deal the entries out: each entry to s
of the n clients, ``copies``, drawn at random, 2 <= s <= n::

    xhat_i <- x_i - rate (grad f_i(x_i) - h_i)
    with probability p       x_i <- xbar = 1/s sum_j q_j * xhat_j    entry by entry
                             h_i <- h_i + p eta/rate q_i * (xbar - xhat_i)
    with probability 1 - p   x_i <- xhat_i               eta = n (s - 1)/(s (n - 1))

A round is one communication, and the geometric(p) steps before it; the server tosses,
as in ``scaffnew``, and sends the seed of the masks beside the model. A client settles
h_i when it receives the next model. It sends s/n of its entries, and no places: masks
follow from the seed. Clients know their masks by their ids. With s = n it is Scaffnew.
The rate of theory is 2/(L + mu): see ``theory.local_training``, which proves what a
step and a round bring.

It is TAMUNA with all clients in every round. With fewer, TAMUNA does not fit what an
algorithm is here; docs/communication.md says why.

Where this differs from the paper: communications are given, not steps; 1/p is whole;
steps may be of minibatches. Neither paper was at hand but for their abstracts: the loop
is from memory, eta and the rate follow from the proof in ``theory.local_training``. A
lost answer is never made up for, as in ``locodl``.

Reference: Condat, Agarský, Richtárik, "CompressedScaffnew: the first theoretical double
acceleration of communication from local training and compression in distributed
optimization", Optimization, 2026, arXiv:2210.13277.
"""

from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.scaffnew import Coin, toss
from fedblend.batch_statistics import hold_statistics
from fedblend.checks import COUNT, POSITIVE, Count, Number
from fedblend.compress import sparse
from fedblend.compress.compressor import decode, encode
from fedblend.compress.sparse import dealt
from fedblend.core import Algorithm, Down, Loss, Needs, PyTree, Up, Wire
from fedblend.local import Work, descend_times, require_constant_rate
from fedblend.losses import gradient
from fedblend.registry import NewClient, algorithm
from fedblend.theory import local_training as theory
from fedblend.theory.local_training import dealt_scales


class CompressedScaffnewClient(NamedTuple):
    """A client: h_i; xhat_i and the seed of its last round, if it had one."""

    control: PyTree
    reached: PyTree
    seed: jax.Array
    new: jax.Array


class Sent(NamedTuple):
    """Beside the model: local steps, and the seed of the masks."""

    local: jax.Array
    seed: jax.Array


@algorithm(
    theory=theory.compressed_scaffnew,
    coin=True,
    encodes=True,
    everyone=True,
    new_client=NewClient(build=fedavg),
)
def compressed_scaffnew(
    loss: Loss,
    work: Work,
    *,
    clients: Count,
    copies: Annotated[int, Number(whole=True, least=2)],
) -> Algorithm:
    """Local steps with control variates; each entry is sent by some clients.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the constant rate of the local steps; the mean number of local steps in a
            round, the same for all clients; the rows of a step.
        clients: n, the number of clients.
        copies: s, how many clients send each entry, from 2 to n.
    """
    require_constant_rate("compressed_scaffnew: work", work)
    rate = POSITIVE("compressed_scaffnew: work: optimizer", work.optimizer)
    p = 1 / COUNT("compressed_scaffnew: work: steps", work.steps)
    train = partial(descend_times, gradient(loss), work=work)
    masked = partial(dealt, clients, copies)

    def send(seed, tree, shard, key):
        """What a client sends of a tree, whose entries it multiplies by n/s."""
        return encode(masked(seed), tree, key, shard, sparse.NAME)

    def receive(seed, encoded, sender):
        return decode(masked(seed), encoded, None, sparse.NAME, sender.id)

    def begin(key) -> dict[str, Sent]:
        return {"scaffnew": Sent(toss(key, p), sparse.seed_of(key))}

    def enroll(params, shard, key):
        zeros, seed = trees.zeros_like(params), jnp.zeros(2, jnp.uint32)
        state = CompressedScaffnewClient(zeros, params, seed, jnp.ones((), bool))
        return (), state

    def start(params, joins, central, key):
        dealt_scales(clients, copies)  # refuses more copies than clients
        none = jnp.zeros((), jnp.int32)
        return Down(params, none, extra=begin(key)), Coin(none)

    def client(down, client, shard, key):
        scale = p * dealt_scales(clients, copies)[0] / rate * copies / clients
        gap = hold_statistics(trees.subtract(down.shared, client.reached))
        moved = receive(client.seed, send(client.seed, gap, shard, key), shard)
        settled = trees.add(client.control, trees.scale(scale, moved))
        control = trees.select(client.new, client.control, settled)
        push = trees.add_where_given(trees.scale(-1, control), down.correction)
        times, seed = down.extra["scaffnew"]
        reached, mean = train(down.shared, shard, key, times=times, correction=push)
        delta = trees.subtract(reached, down.shared)
        encoded = send(seed, delta, shard, key)
        new = jnp.zeros((), bool)
        after = CompressedScaffnewClient(control, reached, seed, new)
        return Up(encoded, mean), after

    def server(aggregate, down, server, central, key):
        shared = trees.add(down.shared, aggregate.mean.delta)
        done = Coin(server.local + down.extra["scaffnew"].local)
        return down._replace(shared=shared, extra=begin(key)), done

    def undo(up, sender):
        seed = sender.down.extra["scaffnew"].seed
        return up._replace(delta=receive(seed, up.delta, sender))

    needs = Needs(
        everyone=True, mean=True, uniform=True, weights="uniform", clients=clients
    )
    return Algorithm(enroll, start, client, server, wire=Wire(decode=undo), needs=needs)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest second runtime: one client after another, everything said as bytes.

It shares with the simulator the algorithm, the rule of the keys, the cohorts and the
wire, and nothing else: there is no map over clients and no compiled block.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.core import Aggregate, Sender, Up
from fedblend.simulation.sampling import cohorts
from fedblend.simulation.serialize import complete_message, pack, traveling, unpack


class Outcome(NamedTuple):
    """What it comes to, and the bits of data each client sent and received."""

    down: Any
    server: Any
    states: list
    models: list
    bits_up: np.ndarray
    bits_down: np.ndarray


def carry(message):
    """A message as it arrives, and the bits of data in it.

    Only its shapes are known to the receiver beforehand.
    """
    data = pack(traveling(message))
    arrays, _ = unpack(data)
    header = int.from_bytes(data[:8], "little")
    shapes = jax.eval_shape(lambda: message)
    return complete_message(arrays, shapes), 8 * (len(data) - 8 - header)


def weighted_mean(values: list, weights: list[float]):
    """The mean, summed in float64 in the order given."""

    def mean(*leaves):
        total = sum(
            w * np.asarray(leaf, float) for w, leaf in zip(weights, leaves, strict=True)
        )
        return jnp.asarray(total / sum(weights), leaves[0].dtype)

    return jax.tree.map(mean, *values)


def run_by_messages(algorithm, problem, root, *, rounds: int, cohort: int) -> Outcome:
    """The same run as ``simulate`` with the algorithm's weights, message by message."""
    train, clients = problem.federated_data.train, problem.federated_data.clients
    shards = [jax.device_put(train.shard(client)) for client in range(clients)]
    by_count = algorithm.needs.weights == "by_count"
    weights = train.counts.astype(float) if by_count else np.ones(clients)
    client, server = jax.jit(algorithm.client), jax.jit(algorithm.server)
    personal = jax.jit(algorithm.personal)
    up_bits, down_bits = np.zeros(clients, int), np.zeros(clients, int)

    joins, states = [], []
    for i, shard in enumerate(shards):
        key = keys.derive(root, "enroll", 0, i)
        join, state = algorithm.enroll(problem.params, shard, key)
        join, bits = carry(join)
        up_bits[i] += bits
        joins.append(join)
        states.append(state)
    join = Aggregate(
        weighted_mean(joins, list(weights)), jnp.ones(()), jnp.int32(clients)
    )
    down, memory = algorithm.start(
        problem.params, join, None, keys.derive(root, "start")
    )

    joined: set[int] = set()
    for number, ids in enumerate(cohorts(root, range(rounds), clients, cohort)):
        ups, aggregate = [], []
        for i in map(int, ids):
            told = algorithm.wire.tell(down, algorithm.wire.ask(states[i], shards[i]))
            told, bits = carry(told)
            down_bits[i] += bits - 8 * told.round.nbytes
            remembers = bool(jax.tree.leaves(states[i]))
            if i not in joined and remembers and jax.tree.leaves(told.shared):
                down_bits[i] += carry(problem.params)[1]
            joined.add(i)
            key = keys.derive(root, "client", number, i)
            up, states[i] = client(told, states[i], shards[i], key)
            up, bits = carry(up._replace(mean_gradient=None, step_sum=None))
            up_bits[i] += bits
            decoded: Up = algorithm.wire.decode(up, Sender(jnp.int32(i), key, down))
            ups.append(decoded)
            aggregate.append(weights[i])
        share = jnp.asarray(sum(aggregate) / weights.sum(), jnp.float32)
        news = Aggregate(
            weighted_mean(ups, aggregate), share, jnp.int32(len(aggregate))
        )
        down, memory = server(
            news, down, memory, None, keys.derive(root, "server", number)
        )
        down = down._replace(round=down.round + 1)

    models = []
    for i in range(clients):
        told = algorithm.wire.tell(down, algorithm.wire.ask(states[i], shards[i]))
        key = keys.derive(root, "personal", rounds, i)
        models.append(personal(told, states[i], shards[i], key))
    return Outcome(down, memory, states, models, up_bits, down_bits)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Enrollment, start and rounds of a simulation: pure functions of arrays, one replica.

``engine`` compiles them and maps them over the replicas of a sweep.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.core import (
    Aggregate,
    Algorithm,
    Down,
    Key,
    PyTree,
    Shard,
    Up,
    has_ragged,
    ragged_bits,
)
from fedblend.simulation import aggregators


class Members(NamedTuple):
    """Clients of a cohort or of a group: arrays over them.

    ``slots`` are their places among the states, ``present`` is False on padding.
    """

    ids: jax.Array
    slots: jax.Array
    starts: jax.Array
    counts: jax.Array
    weights: jax.Array
    present: jax.Array


class Settings(NamedTuple):
    """What is fixed when a simulation is compiled.

    ``everyone`` is the weight of the whole federation, ``chunk`` the number of clients
    that are mapped at once.
    """

    build: Callable[[Any], Algorithm]
    capacity: int
    chunk: int
    everyone: float
    dropout: float
    reduction: aggregators.Reduction


class Shapes(NamedTuple):
    """What server and one client exchange and remember, as shapes and dtypes.

    ``message`` is what a client receives, ``decoded`` its up as the server sums it,
    ``last`` the message from which it makes the model that it deploys.
    """

    params: PyTree
    join: PyTree
    state: PyTree
    down: Down
    server: PyTree
    message: Down
    up: Any
    decoded: Up
    last: Down


class Log(NamedTuple):
    """What became of each member of each round, and the ragged bits of messages."""

    status: jax.Array
    up_bits: jax.Array | None
    down_bits: jax.Array | None


def shard_of(settings: Settings, examples: PyTree, member: Members) -> Shard:
    """The training data of one member."""
    return Shard(examples, member.starts, member.counts, member.ids, settings.capacity)


def enroll(
    settings: Settings,
    hyper: Any,
    root: Key,
    params: PyTree,
    examples: PyTree,
    members: Members,
) -> tuple[aggregators.RunningSum, PyTree]:
    """The sum of what a group of clients sends on joining, and their states."""
    algorithm = settings.build(hyper)

    def one(member):
        key = keys.at(root, "enroll", 0, member.ids)
        shard = shard_of(settings, examples, member)
        return trees.strongly_typed(algorithm.enroll(params, shard, key))

    join, states = jax.lax.map(one, members, batch_size=settings.chunk)
    shapes = jax.tree.map(lambda leaf: leaf[0], join)
    first = aggregators.empty(shapes)
    running_sum, _ = aggregators.add_to(first, join, members.weights, members.present)
    return running_sum, states


def start(
    settings: Settings,
    hyper: Any,
    root: Key,
    params: PyTree,
    join: Aggregate,
    central: Shard | None,
) -> tuple[Down, PyTree]:
    """The server's first message, and its state."""
    begun = settings.build(hyper).start(params, join, central, keys.at(root, "start"))
    return trees.strongly_typed(begun)


def exchange(
    settings: Settings,
    algorithm: Algorithm,
    root: Key,
    down: Down,
    examples: PyTree,
    state: PyTree,
    member: Members,
) -> tuple[Down, Any, PyTree]:
    """One client's part in a round: both messages as they travel, and its new state."""
    shard = shard_of(settings, examples, member)
    message = algorithm.tell(down, algorithm.ask(state, shard))
    key = keys.at(root, "client", down.round, member.ids)
    up, after = algorithm.client(message, state, shard, key)
    return message, up._replace(mean_gradient=None, step_sum=None), after


def block(
    shapes: Shapes,
    settings: Settings,
    hyper: Any,
    root: Key,
    carry: tuple[Down, PyTree],
    states: PyTree,
    examples: PyTree,
    central: Shard | None,
    plan: Members,
    first: jax.Array,
    last: jax.Array,
) -> tuple[tuple[Down, PyTree], PyTree, Log]:
    """Rounds ``first`` to ``last`` of one replica.

    ``carry`` is (down, server), ``plan`` the members of each round. The number of
    rounds is not static: a last, shorter block is not compiled anew.
    """
    algorithm = settings.build(hyper)
    answers = _chunked_answers(settings, shapes, algorithm, root, examples)

    def one_round(number, so_far):
        down, server, states, log = so_far
        place = number - first
        aggregate, states, entry = answers(down, states, trees.take(plan, place))
        after = algorithm.server(
            aggregate, down, server, central, keys.at(root, "server", number)
        )
        down, server = trees.select(aggregate.count > 0, after, (down, server))
        log = jax.tree.map(lambda all, this: all.at[place].set(this), log, entry)
        return down._replace(round=down.round + 1), server, states, log

    def ragged(message):
        return jnp.zeros(plan.ids.shape, jnp.int32) if has_ragged(message) else None

    status = jnp.zeros(plan.ids.shape, jnp.int8)
    log = Log(status, ragged(shapes.up), ragged(shapes.message))
    down, server, states, log = jax.lax.fori_loop(
        first, last, one_round, (*carry, states, log)
    )
    return (down, server), states, log


def _chunked_answers(
    settings: Settings,
    shapes: Shapes,
    algorithm: Algorithm,
    root: Key,
    examples: PyTree,
) -> Callable[[Down, PyTree, Members], tuple[Aggregate, PyTree, Log]]:
    """A function from a round's members to their aggregate, states and log.

    Ups are summed chunk by chunk: a cohort of any size costs the memory of one chunk.
    """
    chunk, middle = settings.chunk, settings.reduction.stacked

    def one(down, state, member):
        """The decoded up, the new state, whether it answered, and ragged bits."""
        message, up, after = exchange(
            settings, algorithm, root, down, examples, state, member
        )
        answered = member.present
        if settings.dropout > 0:
            lot = jax.random.uniform(keys.at(root, "dropout", down.round, member.ids))
            answered = answered & (lot >= settings.dropout)
        bits = ragged_bits(up), ragged_bits(message)
        return algorithm.decode(up), after, answered, bits

    def several(down, states, members):
        if chunk > 1:
            return jax.vmap(one, in_axes=(None, 0, 0))(down, states, members)
        # A single client is not mapped: plain products are faster than batched ones.
        alone = one(down, trees.take(states, 0), trees.take(members, 0))
        return jax.tree.map(lambda leaf: leaf[None], alone)

    def add_chunk(down, carry, members):
        total, states = carry
        old = trees.take(states, members.slots)
        ups, new, answered, bits = several(down, old, members)
        total, finite = aggregators.add_to(total, ups, members.weights, answered)
        received = answered & finite
        # Slots of padding lie beyond the end and are dropped.
        states = jax.tree.map(
            lambda all, after: all.at[members.slots].set(after, mode="drop"),
            states,
            trees.select(received, new, old),
        )
        status = jnp.where(received, aggregators.RECEIVED, aggregators.REJECTED)
        status = jnp.where(answered, status, aggregators.DROPPED)
        status = jnp.where(members.present, status, aggregators.PADDING)
        log = Log(status.astype(jnp.int8), *bits)
        return (total, states), (log, (ups, received) if middle is not None else None)

    def answers(down, states, members):
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk), members)
        carry = (aggregators.empty(shapes.decoded), states)
        (total, states), outcome = jax.lax.scan(partial(add_chunk, down), carry, chunks)
        log, stack = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outcome
        )
        aggregate = aggregators.finish(total, settings.everyone)
        if middle is not None:
            ups, received = stack
            mean = jax.tree.map(partial(middle, received), ups)
            aggregate = aggregate._replace(mean=mean)
        return aggregate, states, log

    return answers

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
    """Clients of a cohort or of a group: arrays over them."""

    ids: jax.Array
    slots: jax.Array
    starts: jax.Array
    counts: jax.Array
    weights: jax.Array
    present: jax.Array


class Settings(NamedTuple):
    """What is fixed when a simulation is compiled."""

    build: Callable[[Any], Algorithm]
    capacity: int
    chunk: int
    everyone: float
    dropout: float
    reduction: aggregators.Reduction


class Shapes(NamedTuple):
    """What passes between server and one client, as shapes and dtypes."""

    params: PyTree
    join: PyTree
    state: PyTree
    down: Down
    server: PyTree
    message: Down
    up: Any
    decoded: Up
    last: Down


class Exchange(NamedTuple):
    """What one member of a cohort hears, says, and becomes."""

    message: Down
    up: Any
    state: PyTree


class Answer(NamedTuple):
    """What the server makes of one member of a cohort."""

    up: Up
    state: PyTree
    answered: jax.Array
    up_bits: jax.Array | None
    down_bits: jax.Array | None


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
    """The sum of what a group of clients says on joining, and their states."""
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
) -> Exchange:
    """One client's part in a round, as its messages travel."""
    shard = shard_of(settings, examples, member)
    message = algorithm.tell(down, algorithm.ask(state, shard))
    key = keys.at(root, "client", down.round, member.ids)
    up, after = algorithm.client(message, state, shard, key)
    return Exchange(message, up._replace(mean_gradient=None, step_sum=None), after)


def answer(
    settings: Settings,
    algorithm: Algorithm,
    root: Key,
    down: Down,
    examples: PyTree,
    state: PyTree,
    member: Members,
) -> Answer:
    """One client's part in a round, as the server takes it."""
    talk = exchange(settings, algorithm, root, down, examples, state, member)
    answered = member.present
    if settings.dropout > 0:
        lot = jax.random.uniform(keys.at(root, "dropout", down.round, member.ids))
        answered = answered & (lot >= settings.dropout)
    bits = ragged_bits(talk.up), ragged_bits(talk.message)
    return Answer(algorithm.decode(talk.up), talk.state, answered, *bits)


def block(
    settings: Settings,
    shapes: Shapes,
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
    settings: Settings, shapes: Shapes, algorithm: Algorithm, root, examples
):
    """A function from a round's members to what is heard of them.

    Ups are summed chunk by chunk: a cohort of any size costs the memory of one chunk.
    """
    chunk, middle = settings.chunk, settings.reduction.stacked

    def one(down, state, member):
        return answer(settings, algorithm, root, down, examples, state, member)

    def several(down, states, members):
        if chunk > 1:
            return jax.vmap(one, in_axes=(None, 0, 0))(down, states, members)
        # A lone client is not mapped: plain products are faster than batched ones.
        alone = one(down, trees.take(states, 0), trees.take(members, 0))
        return jax.tree.map(lambda leaf: leaf[None], alone)

    def listen(down, carry, members):
        running_sum, states = carry
        old = trees.take(states, members.slots)
        given = several(down, old, members)
        running_sum, finite = aggregators.add_to(
            running_sum, given.up, members.weights, given.answered
        )
        aggregate = given.answered & finite
        # Slots of padding lie beyond the end and are dropped.
        states = jax.tree.map(
            lambda all, new: all.at[members.slots].set(new, mode="drop"),
            states,
            trees.select(aggregate, given.state, old),
        )
        status = jnp.where(aggregate, aggregators.RECEIVED, aggregators.REJECTED)
        status = jnp.where(given.answered, status, aggregators.DROPPED)
        status = jnp.where(members.present, status, aggregators.PADDING).astype(
            jnp.int8
        )
        stack = (given.up, aggregate) if middle is not None else None
        return (running_sum, states), (
            Log(status, given.up_bits, given.down_bits),
            stack,
        )

    def answers(down, states, members):
        chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, chunk), members)
        carry = (aggregators.empty(shapes.decoded), states)
        (running_sum, states), outcome = jax.lax.scan(
            lambda carry, these: listen(down, carry, these), carry, chunks
        )
        log, stack = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outcome
        )
        aggregate = aggregators.finish(running_sum, settings.everyone)
        if middle is not None:
            ups, mask = stack
            mean = jax.tree.map(partial(middle, mask), ups)
            aggregate = aggregate._replace(mean=mean)
        return aggregate, states, log

    return answers

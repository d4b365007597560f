# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Enrollment, start and rounds of a simulation: pure functions of arrays, one replica.

``engine`` compiles them, maps them over the replicas of a sweep, and spreads them over
devices: each runs these functions on its own groups of the cohort's chunks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fedblend import keys, trees
from fedblend.core import (
    Aggregate,
    Algorithm,
    Down,
    Key,
    PyTree,
    Sender,
    Shard,
    Up,
    has_ragged,
    ragged_bits,
)
from fedblend.simulation import aggregators, devices


class Members(NamedTuple):
    """Clients of a cohort or of those who join: arrays over them.

    Where they are many, arrays end in [groups, chunks of a group, chunk]. ``slots`` are
    their places among the states, ``present`` is False on padding.
    """

    ids: Any
    slots: Any
    starts: Any
    counts: Any
    weights: Any
    present: Any


class Settings(NamedTuple):
    """What is fixed when a simulation is compiled.

    ``everyone`` is the weight of the whole federation, ``chunk`` the number of clients
    that are mapped at once, ``width`` the number of devices that share a cohort,
    ``mean_count`` the mean number of rows of all clients. Where cohorts have a
    ``random_size`` the server takes its step also if nobody is in one: whether that
    is so must not show.
    """

    build: Callable[[Any], Algorithm]
    capacity: int
    chunk: int
    everyone: float
    dropout: float
    reduction: aggregators.Reduction
    width: int = 1
    mean_count: float | None = None
    random_size: bool = False


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
    return Shard(
        examples,
        member.starts,
        member.counts,
        member.ids,
        settings.capacity,
        mean_count=settings.mean_count,
    )


def enroll(
    settings: Settings,
    hyper: Any,
    root: Key,
    params: PyTree,
    examples: PyTree,
    members: Members,
    turns: jax.Array | None,
) -> tuple[aggregators.RunningSum, PyTree]:
    """The sum of what clients send on joining, and what each client keeps and sends.

    These are its state, and what it sends where the reduction needs all of them.
    ``turns`` are the chunks of each group.
    """
    algorithm, alone = settings.build(hyper), settings.reduction.stacked is not None

    def one(member):
        key = keys.derive(root, "enroll", 0, member.ids)
        shard = shard_of(settings, examples, member)
        return trees.strongly_typed(algorithm.enroll(params, shard, key))

    def add_chunk(total, nothing, members):
        join, states = side_by_side(one)(members)
        total, _ = aggregators.add_to(total, join, members.weights, members.present)
        return total, nothing, (states, join if alone else ())

    join, _ = jax.eval_shape(one, trees.take(members, (0, 0, 0)))
    first = aggregators.empty(join)
    sums, _, each = sum_groups(add_chunk, first, (), members, turns)
    return devices.total(settings.width, sums), trees.flat(each, 3)


def start(
    settings: Settings,
    hyper: Any,
    root: Key,
    params: PyTree,
    join: Aggregate,
    central: Shard | None,
) -> tuple[Down, PyTree]:
    """The server's first message, and its state."""
    begun = settings.build(hyper).start(
        params, join, central, keys.derive(root, "start")
    )
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
    """``answer`` of a member."""
    shard = shard_of(settings, examples, member)
    return answer(algorithm, root, down, shard, state)


def answer(
    algorithm: Algorithm, root: Key, down: Down, shard: Shard, state: PyTree
) -> tuple[Down, Any, PyTree]:
    """One client's part in a round: both messages as they travel, and its new state."""
    message = algorithm.wire.tell(down, algorithm.wire.ask(state, shard))
    key = keys.derive(root, "client", down.round, shard.id)
    up, after = algorithm.client(message, state, shard, key)
    return message, up._replace(mean_gradient=None, step_sum=None), after


def side_by_side(one: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """``one``, of a chunk's arrays in place of a client's."""

    def several(*chunk):
        if len(jax.tree.leaves(chunk)[0]) > 1:
            return jax.vmap(one)(*chunk)
        # A single client is not mapped: plain products are faster than batched ones.
        return jax.tree.map(lambda leaf: leaf[None], one(*trees.take(chunk, 0)))

    return several


def sum_groups(
    add_chunk: Callable[[Any, Any, Members], tuple[Any, Any, PyTree]],
    first: aggregators.RunningSum,
    carry: PyTree,
    members: Members,
    turns: jax.Array | None,
) -> tuple[aggregators.RunningSum, PyTree, PyTree]:
    """Go through a device's chunks; the sum of each group, the carry, and the outcomes.

    A cohort of any size costs the memory of one chunk, of its outcomes, and of the sums
    of groups.

    Args:
        add_chunk: from the group's running sum, the carry and a chunk's members to both
            anew, and the chunk's outcome.
        first: the sum before a group's first chunk.
        carry: what goes from chunk to chunk.
        members: [groups, chunks of a group, chunk].
        turns: the chunks of each group; outcomes beyond are zeros. None where there is
            a single chunk on a single device.
    """
    groups, most, _ = members.ids.shape

    def chunk(group, number):
        return trees.take(members, (group, number))

    add_chunk, (*_, shapes) = _trace_once(add_chunk, first, carry, chunk(0, 0))
    outcomes = jax.tree.map(
        lambda leaf: jnp.zeros((groups, most, *leaf.shape), leaf.dtype), shapes
    )

    def one_group(group, so_far):
        sums, carry, outcomes = so_far

        def one_chunk(number, so_far):
            total, carry, outcomes = so_far
            total, carry, outcome = add_chunk(total, carry, chunk(group, number))
            outcomes = trees.put(outcomes, outcome, group, number)
            return total, carry, outcomes

        total, carry, outcomes = jax.lax.fori_loop(
            0, 1 if turns is None else turns[group], one_chunk, (first, carry, outcomes)
        )
        return trees.put(sums, total, group), carry, outcomes

    sums = jax.tree.map(lambda leaf: jnp.stack([leaf] * groups), first)
    # Neither number of turns is static: a compiler that sees a loop of one turn merges
    # it with what surrounds it, and rounds otherwise.
    end = groups if turns is None else (turns >= 0).sum()
    return jax.lax.fori_loop(0, end, one_group, (sums, carry, outcomes))


def _trace_once(
    function: Callable[..., PyTree], *arguments: PyTree
) -> tuple[Callable[..., PyTree], PyTree]:
    """The function, which is not traced again, and the shapes of what it returns."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    compute, structure = jaxpr_as_fun(program), jax.tree.structure(shapes)

    def again(*arguments):
        return structure.unflatten(compute(*jax.tree.leaves(arguments)))

    return again, shapes


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
    turns: jax.Array | None,
    first: jax.Array,
    last: jax.Array,
) -> tuple[tuple[Down, PyTree], PyTree, Log]:
    """Rounds ``first`` to ``last`` of one replica.

    ``carry`` is (down, server), ``plan`` the members of each round, ``turns`` the
    chunks of each group. The number of rounds is not static: a last, shorter block is
    not compiled anew. A device beside the host computes all rounds of the plan, for it
    would wait for the host before each round otherwise; in those from ``last`` on
    nobody takes part.
    """
    algorithm = settings.build(hyper)
    answers = _answers(settings, shapes, algorithm, root, examples, turns)

    def one_round(place, so_far):
        down, server, states, log = so_far
        number = first + place
        counts = number < last
        members = trees.take(plan, place)
        members = members._replace(present=members.present & counts)
        aggregate, states, entry = answers(down, states, members)
        key = keys.derive(root, "server", number)
        given = (aggregate, down, server, central, key)
        after = devices.run_once(settings.width, algorithm.server, *given)
        heard = (aggregate.count > 0) | settings.random_size
        down, server = trees.select(heard & counts, after, (down, server))
        log = trees.put(log, entry, place)
        round = down.round + counts.astype(down.round.dtype)
        return down._replace(round=round), server, states, log

    def bits_log(message):
        return jnp.zeros(plan.ids.shape, jnp.int32) if has_ragged(message) else None

    status = jnp.zeros(plan.ids.shape, jnp.int8)
    log = Log(status, bits_log(shapes.up), bits_log(shapes.message))
    rounds = len(plan.ids) if devices.has_accelerator() else last - first
    so_far = jax.lax.fori_loop(0, rounds, one_round, (*carry, states, log))
    down, server, states, log = so_far
    return (down, server), states, log


def _answers(
    settings: Settings,
    shapes: Shapes,
    algorithm: Algorithm,
    root: Key,
    examples: PyTree,
    turns: jax.Array | None,
) -> Callable[[Down, PyTree, Members], tuple[Aggregate, PyTree, Log]]:
    """A function from a round's members to their aggregate, states and log."""
    width, middle = settings.width, settings.reduction.stacked

    def one(down, state, member):
        """The decoded up, the new state, whether it answered, and ragged bits."""
        message, up, after = exchange(
            settings, algorithm, root, down, examples, state, member
        )
        answered = member.present
        if settings.dropout > 0:
            lot = jax.random.uniform(
                keys.derive(root, "dropout", down.round, member.ids)
            )
            answered = answered & (lot >= settings.dropout)
        bits = ragged_bits(up), ragged_bits(message)
        key = keys.derive(root, "client", down.round, member.ids)
        sender = Sender(member.ids, key, down)
        return algorithm.wire.decode(up, sender), after, answered, bits

    def add_chunk(down, total, states, members):
        # Whether states come from and go to other devices must not change how what lies
        # between is compiled.
        old = jax.lax.optimization_barrier(devices.read(width, states, members.slots))
        ups, new, answered, bits = side_by_side(partial(one, down))(old, members)
        total, finite = aggregators.add_to(total, ups, members.weights, answered)
        received = answered & finite
        kept = jax.lax.optimization_barrier(trees.select(received, new, old))
        states = devices.write(width, states, members.slots, kept)
        status = jnp.where(received, aggregators.RECEIVED, aggregators.REJECTED)
        status = jnp.where(answered, status, aggregators.DROPPED)
        log = Log(status.astype(jnp.int8), *bits)
        return total, states, (log, (ups, received) if middle is not None else None)

    def answers(down, states, members):
        first, taken = aggregators.empty(shapes.decoded), turns
        if settings.random_size and width == 1 and turns is not None:
            # Members come first, so that the chunks of nobody end a group. Devices that
            # share a cohort read states together and take the same turns.
            taken = jnp.minimum(turns, members.present.any(-1).sum(-1))
        sums, states, (log, stack) = sum_groups(
            partial(add_chunk, down), first, states, members, taken
        )
        status = jnp.where(members.present, log.status, aggregators.PADDING)
        log = log._replace(status=status.astype(jnp.int8))
        total = devices.total(width, sums)
        aggregate = aggregators.finish(total, settings.everyone)
        if middle is not None:
            ups, received = trees.flat(devices.gather(width, stack), 3)
            mean = jax.tree.map(partial(middle, received), ups)
            aggregate = aggregate._replace(mean=mean)
        return aggregate, states, log

    return answers

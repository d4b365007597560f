# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local training: one scan of optimizer steps that serves every algorithm.

An algorithm gives the direction (``direction(variables, batch)``, nearly
always a ``jax.grad``), and ``descend`` takes the steps. What is descended may be the
parameters, or any tree of variables such as a pair of models and a mixing weight.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedblend import keys, trees
from fedblend.batch_statistics import take_step
from fedblend.batches import (
    can_draw_alone,
    client_entry,
    epoch_order,
    everything,
    random_rows,
    random_rows_of,
    rows_at,
)
from fedblend.checks import (
    COUNT,
    FUNCTION,
    OF_TYPE,
    Lengths,
    Number,
    gate,
    optional,
    words,
)
from fedblend.core import Down, Key, PyTree, Shard, Up
from fedblend.errors import UserError
from fedblend.step_log import tell
from fedblend.uneven_loop import own_loop

MOST_DRAWN, MOST_ORDERED = 2**14, 2**26
"""Row numbers of random batches, and of epochs, that a client holds at once; beyond
that, the batch of each step is drawn when the step is taken, and is the same. Drawn so,
small random batches cost up to a sixth more on a CPU; an epoch is sorted anew in every
step, which may cost ten times as much."""


class Epochs(NamedTuple):
    """Local work of so many passes over a client's own rows, in random order."""

    number: int


class Scheduled(NamedTuple):
    """An optimizer whose rate follows ``schedule``, counted in ``unit``.

    "round" counts communication rounds and holds the rate within one; "step" counts
    a client's local steps over all rounds so far, ``round * steps + step``, whether
    or not it took part in them. (A schedule inside a plain optax optimizer starts
    anew in every round, as the optimizer does.)
    """

    schedule: optax.Schedule
    unit: str
    make: Callable[..., optax.GradientTransformation] = optax.sgd


Optimizer = (
    float
    | jax.Array
    | np.ndarray
    | Literal["theory"]
    | optax.GradientTransformation
    | Scheduled
)
"""A bare number means plain SGD with that rate; an array over clients and "theory" are
for algorithms with ``own_rates``."""


def _is_rule(key: str, value: Any) -> bool:
    """Whether this is an optimizer and not a rate; schedules are looked into."""
    if isinstance(value, Scheduled):
        FUNCTION(f"{key}: schedule", value.schedule)
        words("step", "round")(f"{key}: unit", value.unit)
    return isinstance(value, Scheduled | optax.GradientTransformation)


def _is_epochs(key: str, value: Any) -> bool:
    if isinstance(value, Epochs):
        COUNT(f"{key}: Epochs", value.number)
    return isinstance(value, Epochs)


OPTIMIZER = Number(least=0, besides="an optax optimizer", also=_is_rule)
"""A rate may be 0: the step that theory allows where nothing is shared."""
STEPS = Number(least=1, whole=True, clients=True, besides="Epochs", also=_is_epochs)
Steps = Annotated[int | np.ndarray | Sequence[int] | Epochs, STEPS]
"""Local work of a round: a number, an array of numbers over clients, or epochs."""
ServerOptimizer = Annotated[float | optax.GradientTransformation, OPTIMIZER]
"""An optimizer that lasts over the rounds; a number means plain steps."""
BATCH_SIZE = optional(COUNT)


class Work(NamedTuple):
    """Local work of a client in a round.

    ``optimizer`` starts anew in every round; a number is plain SGD with that rate.
    ``steps`` is the number of local steps, one for all clients or an array over
    clients, or ``Epochs``. ``batch_size`` is the number of rows of a step, drawn with
    replacement (in epochs without), or None for all rows of the client.
    """

    optimizer: Optimizer
    steps: Steps
    batch_size: int | None

    @property
    def client_lengths(self) -> Lengths:
        """The fields that are arrays over clients, and how long they are."""
        fields = {"optimizer": self.optimizer, "steps": self.steps}
        return tuple(
            (name, len(value))
            for name, value in fields.items()
            if isinstance(value, np.ndarray | jax.Array | list) and np.ndim(value)
        )


def work(key: str, value: Any, least: int = 1, rates: Number = OPTIMIZER) -> Work:
    """The rule of ``checks`` for an argument that is local work.

    Args:
        key: of the argument.
        value: the argument.
        least: the smallest number of steps.
        rates: the rule of its optimizer.
    """
    if not isinstance(value, Work):
        raise UserError(key, value, "fb.Work(optimizer, steps, batch_size)")
    steps = dataclasses.replace(STEPS, least=least)
    return Work(
        rates(f"{key}: optimizer", value.optimizer),
        steps(f"{key}: steps", value.steps),
        BATCH_SIZE(f"{key}: batch_size", value.batch_size),
    )


def require_constant_rate(key: str, work: Work) -> None:
    """Refuse local work with an optimizer or a schedule; ``key`` names the work."""
    if isinstance(work.optimizer, tuple):
        what = "schedule" if isinstance(work.optimizer, Scheduled) else "optimizer"
        said = "a schedule" if what == "schedule" else "an optimizer"
        raise UserError(f"{key}: {what}", work, "a constant learning rate", said)


def is_theory(rate: Any) -> bool:
    """Whether this stands for the rates that theory allows each client."""
    return isinstance(rate, str) and rate == "theory"


RATES = Number(
    above=0,
    clients=True,
    besides='"theory"',
    also=lambda key, value: is_theory(value),
)


def own_rates(key: str, value: Any) -> Work:
    """The rule for work at a constant rate: of all, of each client, or theory's."""
    if isinstance(value, Work):
        require_constant_rate(key, value)
    return work(key, value, rates=RATES)


OF_TYPE[Work] = work
WorkOrNone = Annotated[Work, partial(work, least=0)]
"""Local work that may have no steps."""


@gate(direction=FUNCTION, work=partial(work, least=0))
def descend(
    direction: Callable[..., PyTree],
    variables: PyTree,
    shard: Shard,
    key: Key,
    *,
    work: Work,
    round: jax.Array | int = 0,
    correction: PyTree | None = None,
    penalty: Callable[[PyTree], jax.Array] | None = None,
    further: Sequence[str | tuple[str, Shard]] = (),
) -> tuple[PyTree, PyTree]:
    """Take the local steps of a round.

    Args:
        direction: ``direction(variables, batch)``, gradient of the objective on a
            batch, structured as ``variables``.
        variables: where to start; statistics of batches follow their own rule.
        shard: the client's data.
        key: randomness of the batches, each of which has a key of its own.
        work: optimizer, steps and batch size. Where the clients' steps differ, those
            who are mapped together take turns, see ``uneven_loop``.
        round: the round, for schedules.
        correction: a tree added to every gradient; None stands for nothing, at any
            node.
        penalty: a function of the variables whose gradient is added to every step.
        further: purposes of further batches of every step, each drawn independently of
            the others; ``direction`` takes them behind the first, which stays the same.
            A purpose with a shard is drawn from that one instead.

    Returns:
        The variables reached, and the mean of ``direction`` alone over the steps taken,
        without correction and penalty.
    """
    own, most = plan_steps(shard, work)
    if isinstance(own, int) and own == 0:  # there is no batch to read
        return variables, trees.zeros_like(variables)
    transform = resolve(work.optimizer, round, own)
    named = [(one, shard) if isinstance(one, str) else one for one in further]
    sources = [(key, shard), *((keys.named(key, why), rows) for why, rows in named)]
    streams = [
        _batches(rows, own_key, work.steps, work.batch_size, most)
        for own_key, rows in sources
    ]
    plans = [plan for _, plan in streams]
    own_keys = [keys.named(own_key, "loss") for own_key, _ in sources]

    def step(number, carry):
        here, state, total = carry
        drawn = zip(streams, trees.take(plans, number), own_keys, strict=True)
        batches = [
            read(number, rows)._replace(key=jax.random.fold_in(own_key, number))
            for (read, _), rows, own_key in drawn
        ]
        mean_gradient = direction(here, *batches)
        push = trees.add_where_given(mean_gradient, correction)
        if penalty is not None:
            push = trees.add(push, jax.grad(penalty)(here))
        moved, state = take_step(transform, push, state, here, mean_gradient)
        update = partial(trees.subtract, moved, here)
        tell("step", lambda: (number, _norms(mean_gradient), _norms(update())))
        return moved, state, trees.add(total, mean_gradient)

    # Who subtracts where it started must not make XLA keep a copy for every client.
    start = jax.lax.optimization_barrier(variables)
    first = (start, transform.init(variables), trees.zeros_like(variables))
    if isinstance(own, int):
        reached = jax.lax.fori_loop(0, own, step, first)
    else:
        reached = own_loop(own, step, first, _evenness(shard, work))
    variables, _, total = reached
    taken = jnp.maximum(own, 1)
    return variables, jax.tree.map(lambda leaf: leaf / taken.astype(leaf.dtype), total)


def _norms(tree: PyTree) -> PyTree:
    return jax.tree.map(trees.norm, tree)


def local_update(
    direction: Callable[..., PyTree],
    down: Down,
    shard: Shard,
    key: Key,
    *,
    work: Work,
    penalty: Callable[[PyTree], jax.Array] | None = None,
    further: Sequence[str | tuple[str, Shard]] = (),
) -> Up:
    """The answer of a client that takes local steps from the shared model.

    Arguments as of ``descend``; ``down`` has the shared model, the round and the
    correction.
    """
    reached, mean_gradient = descend(
        direction,
        down.shared,
        shard,
        key,
        work=work,
        round=down.round,
        correction=down.correction,
        penalty=penalty,
        further=further,
    )
    return Up(trees.subtract(reached, down.shared), mean_gradient)


def descend_times(
    direction: Callable[..., PyTree],
    variables: PyTree,
    shard: Shard,
    key: Key,
    *,
    times: jax.Array,
    work: Work,
    correction: PyTree | None = None,
) -> tuple[PyTree, PyTree]:
    """Take a number of steps that is known only when the round runs, 1 or more.

    Step t draws its batch from ``fold_in(key, t)``, so that a longer round begins as a
    shorter one does. Other arguments and the result are those of ``descend``, of which
    every step is a call: an optimizer starts anew at every step.

    Args:
        direction: see ``descend``.
        variables: where to start.
        shard: the client's data.
        key: randomness of the batches.
        times: the number of steps, such as one that the server drew and sent.
        work: a rate and a batch size; its steps are not read.
        correction: see ``descend``.
    """
    one = partial(
        descend, direction, work=work._replace(steps=1), correction=correction
    )

    def step(number, carry):
        after, gradient = one(carry[0], shard, jax.random.fold_in(key, number))
        return after, trees.add(carry[1], gradient)

    first = (variables, trees.zeros_like(variables))
    reached, total = jax.lax.fori_loop(0, times, step, first)
    return reached, jax.tree.map(lambda leaf: leaf / times, total)


def plan_steps(shard: Shard, work: Work) -> tuple[int | jax.Array, int]:
    """A client's own number of steps, and the largest over all clients."""
    steps = work.steps
    if isinstance(steps, Epochs):
        size = work.batch_size or shard.capacity
        own = steps.number * _batches_of(shard.count, size)
        return own, steps.number * _batches_of(shard.capacity, size)
    if np.ndim(steps) == 0:
        number = int(np.asarray(steps))
        return number, number
    return client_entry(steps, shard), int(np.max(steps))


def _evenness(shard: Shard, work: Work) -> float:
    """The mean number of steps over the largest; 1 where the mean is not known."""
    if not isinstance(work.steps, Epochs):
        return float(np.mean(work.steps) / np.max(work.steps))
    size = work.batch_size or shard.capacity
    if shard.mean_count is None:
        return 1.0
    # The last batch of an epoch is half full in the mean.
    mean = min(shard.mean_count / size + 0.5, _batches_of(shard.capacity, size))
    return mean / _batches_of(shard.capacity, size)


def step_sum_of(
    work: Work, shard: Shard, round: jax.Array | int = 0
) -> jax.Array | None:
    """Rate times steps of a client that takes plain steps of one rate, else None."""
    optimizer = work.optimizer
    if isinstance(optimizer, optax.GradientTransformation):
        return None
    rate = optimizer
    if isinstance(optimizer, Scheduled):
        if optimizer.unit != "round" or optimizer.make is not optax.sgd:
            return None
        rate = optimizer.schedule(jnp.asarray(round, int))
    own, _ = plan_steps(shard, work)
    return jnp.asarray(rate * own, float)


def resolve(
    optimizer: Optimizer, round: jax.Array | int, steps: jax.Array | int
) -> optax.GradientTransformation:
    """The optax optimizer of a round."""
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    if not isinstance(optimizer, Scheduled):
        return optax.sgd(optimizer)  # pyright: ignore

    def rate(count):
        # JAX divides an int32 in float32 even where everything else is float64.
        return optimizer.schedule(jnp.asarray(count, int))

    if optimizer.unit == "round":
        return optimizer.make(rate(round))
    return optimizer.make(lambda count: rate(round * steps + count))


def _batches_of(count, size: int):
    """Batches in ``count`` rows, the last one possibly smaller."""
    return (count + size - 1) // size


def _batches(shard: Shard, key: Key, steps: Steps, size: int | None, most: int):
    """How to read the batch of a step, and what is drawn for all steps at once."""
    if size is None or (isinstance(steps, Epochs) and size >= shard.capacity):
        whole = everything(shard)
        return (lambda number, picked: whole), None
    if not isinstance(steps, Epochs):
        if most * size <= MOST_DRAWN or not can_draw_alone(key):
            plan = random_rows(shard, key, (most, size))
            return (lambda number, picked: rows_at(shard, picked)), plan

        def draw_at(number, picked):
            del picked
            return rows_at(shard, random_rows_of(shard, key, size, number))

        return draw_at, None

    def order(epoch):
        return epoch_order(shard, jax.random.fold_in(key, epoch))

    orders = None
    if steps.number * shard.capacity <= MOST_ORDERED:
        orders = jax.vmap(order)(jnp.arange(steps.number))
    steps_each = jnp.maximum(_batches_of(shard.count, size), 1)
    last = jnp.maximum(shard.count - 1, 0)

    def batch_at(number, picked):
        del picked
        epoch = jnp.minimum(number // steps_each, steps.number - 1)
        place = number % steps_each * size + jnp.arange(size)
        row = jnp.minimum(place, last)
        index = order(epoch)[row] if orders is None else orders[epoch, row]
        return rows_at(shard, index, place < shard.count)

    return batch_at, None

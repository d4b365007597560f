# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a server makes of its clients' mean step: so many times that step, or not.

A server whose move is linear in the mean it hears, the same at all times, has a gain:
the length of all its moves in answer to a mean of length 1. For ``optax.sgd(rate)`` it
is the rate, with momentum b it is rate / (1 - b), Nesterov's or not, since each mean is
heard again in later rounds, b times as loud each time. Adam, a clipped mean, a rate
that follows a schedule and one that a sweep traces have none.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Aggregate, Down, PyTree, Shard

_CLOCKS = (0, 1, 3, 13, 101, 1009, 10007, 100003)
"""Rounds in which the answer must be the same."""
_ROUNDS = 4
"""Moves that are looked at: memory that fades by one factor shows in four."""
_SAME = 1e-5
"""Answers that differ by this part of the first are the same, up to rounding."""

Server = Callable[..., tuple[Down, PyTree]]


def is_linear(step: Callable, delta: PyTree) -> bool:
    """Whether a server's model and memory are linear in the mean that it hears.

    Args:
        step: ``step(delta) -> (down, server)``.
        delta: the mean, of which only shapes count.
    """

    def reached(delta):
        down, server = step(delta)
        leaves = jax.tree.leaves((down.shared, server))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    after = jax.eval_shape(reached, delta)
    try:
        jax.eval_shape(jax.linear_transpose(reached, delta), after)
    except Exception:
        # Only what is linear can be transposed; what JAX says else is no help here.
        return False
    return True


def gain(
    server: Server,
    aggregate: Aggregate,
    down: Down,
    state: PyTree,
    central: Shard | None,
) -> float | None:
    """How far a server moves in the long run for a mean step of length 1, if it is so.

    Nothing of a run is used but shapes, so that it is known when a round is compiled.

    Args:
        server: half of an algorithm.
        aggregate: what it receives,
        down: what it said,
        state: what it remembers,
        central: and its rows, by their shapes.
    """
    key = jax.random.key(0)

    def step(delta):
        said = aggregate._replace(mean=aggregate.mean._replace(delta=delta))
        return server(said, down, state, central, key)

    if not is_linear(step, aggregate.mean.delta):
        return None
    try:
        found = np.stack(
            [
                _answers(server, aggregate, down, state, central, clock)
                for clock in _CLOCKS
            ]
        )
    except jax.errors.TracerArrayConversionError:
        return None
    if not np.isfinite(found).all():
        return None
    first, *later = found.mean(axis=(0, 2))
    near = _SAME * abs(first)
    fades = later[1] / later[0] if abs(later[0]) > near else 0.0
    strays = np.array(later[1:]) - fades * np.array(later[:-1])
    if np.ptp(found, axis=(0, 2)).max() > near or abs(fades) >= 1:
        return None
    total = float(first + later[0] / (1 - fades))
    return total if total > 0 and np.abs(strays).max() <= near else None


def _answers(
    server: Server,
    aggregate: Aggregate,
    down: Down,
    state: PyTree,
    central: Shard | None,
    clock: int,
) -> np.ndarray:
    """The smallest and largest entries of the moves after a step of ones, by round."""
    # Eagerly also while a round is traced; all values here are made up.
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
        central, said = _blank(central, 0), _blank(aggregate, 0)
        said = said._replace(participation=jnp.ones(()), count=jnp.ones((), jnp.int32))
        silence, still = said.mean.delta, _blank(down, clock)

        def moves(delta):
            memory, found = _blank(state, clock), []
            for number, step in enumerate([delta] + [silence] * (_ROUNDS - 1)):
                mean = said.mean._replace(delta=step)
                # Only memory is to show, and no pull that depends on the model.
                here = still._replace(round=still.round + number)
                after, memory = server(
                    said._replace(mean=mean), here, memory, central, key
                )
                found.append(trees.where_given(delta, after.shared))
            return found

        ones = jax.tree.map(lambda leaf: jnp.asarray(np.ones_like(leaf)), silence)
        _, found = jax.jvp(moves, (silence,), (ones,))
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(move)] for move in found]
    return np.array(
        [[min(map(np.min, move)), max(map(np.max, move))] for move in leaves], float
    )


def _blank(tree: PyTree, clock: int) -> PyTree:
    """Zeros of the same shapes; what counts, by whole numbers, is at the clock."""

    def fill(leaf):
        counts = jnp.issubdtype(leaf.dtype, jnp.integer)
        return jnp.asarray(np.full(leaf.shape, clock if counts else 0, leaf.dtype))

    return jax.tree.map(fill, tree)

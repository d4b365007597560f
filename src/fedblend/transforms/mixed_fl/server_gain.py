# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The gain of a server: the length of all its moves for a mean step of length 1.

A server has a gain if its move is linear in the mean step of the clients and the same
in all rounds. The gain of ``optax.sgd(rate)`` is the rate; with momentum b, Nesterov's
or not, it is rate / (1 - b), since the server repeats a mean step in later rounds, b
times as long each time. Adam, a clipped mean, a rate that follows a schedule and a rate
that a sweep traces have none.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Aggregate, Down, PyTree, Shard

_CLOCKS = (0, 1, 3, 13, 101, 1009, 10007, 100003)
"""Rounds in which the move must be the same."""
_ROUNDS = 4
"""The number of moves compared: momentum of one factor shows in four."""
_SAME = 1e-5
"""Moves that differ by this fraction of the first are the same, up to rounding."""

Server = Callable[..., tuple[Down, PyTree]]


def is_linear(step: Callable, delta: PyTree) -> bool:
    """Whether a server's model and state are linear in the mean step of the clients.

    Args:
        step: ``step(delta) -> (down, server)``.
        delta: the mean step, of which only the shapes matter.
    """

    def reached(delta):
        down, server = step(delta)
        leaves = jax.tree.leaves((down.shared, server))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    after = jax.eval_shape(reached, delta)
    try:
        jax.eval_shape(jax.linear_transpose(reached, delta), after)
    except Exception:
        # JAX transposes linear functions alone; which error it raises does not matter.
        return False
    return True


def gain(
    server: Server,
    aggregate: Aggregate,
    down: Down,
    state: PyTree,
    central: Shard | None,
) -> float | None:
    """The gain of a server, None for a server without one.

    It is derived when a round is compiled, from the shapes of these arguments alone.

    Args:
        server: the server's half of an algorithm.
        aggregate: what it receives.
        down: its message of this round.
        state: its state.
        central: its rows.
    """
    key = jax.random.key(0)

    def step(delta):
        given = aggregate._replace(mean=aggregate.mean._replace(delta=delta))
        return server(given, down, state, central, key)

    if not is_linear(step, aggregate.mean.delta):
        return None
    try:
        found = np.stack(
            [
                _moves(server, aggregate, down, state, central, clock)
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


def _moves(
    server: Server,
    aggregate: Aggregate,
    down: Down,
    state: PyTree,
    central: Shard | None,
    clock: int,
) -> np.ndarray:
    """The smallest and largest entries of the moves after a step of ones, by round."""
    # Evaluated while a round is traced, on made-up values.
    with jax.ensure_compile_time_eval():
        key = jax.random.key(0)
        central, given = _blank(central, 0), _blank(aggregate, 0)
        given = given._replace(
            participation=jnp.ones(()), count=jnp.ones((), jnp.int32)
        )
        zeros, first = given.mean.delta, _blank(down, clock)

        def moves(delta):
            memory, found = _blank(state, clock), []
            for number, step in enumerate([delta] + [zeros] * (_ROUNDS - 1)):
                mean = given.mean._replace(delta=step)
                # Always from the first model: only the state carries over.
                here = first._replace(round=first.round + number)
                after, memory = server(
                    given._replace(mean=mean), here, memory, central, key
                )
                found.append(trees.where_given(delta, after.shared))
            return found

        ones = jax.tree.map(lambda leaf: jnp.asarray(np.ones_like(leaf)), zeros)
        _, found = jax.jvp(moves, (zeros,), (ones,))
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(move)] for move in found]
    return np.array(
        [[min(map(np.min, move)), max(map(np.max, move))] for move in leaves], float
    )


def _blank(tree: PyTree, clock: int) -> PyTree:
    """Zeros of the same shapes; whole numbers, which count steps, are the clock."""

    def fill(leaf):
        counts = jnp.issubdtype(leaf.dtype, jnp.integer)
        return jnp.asarray(np.full(leaf.shape, clock if counts else 0, leaf.dtype))

    return jax.tree.map(fill, tree)

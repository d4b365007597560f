# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Parallel training: clients and server train from one model, and both moves add up.

A round of Algorithm 1 of the paper without augmenting gradients; x is the shared model
and ``g_c = w_c / w_f grad f_c``::

    clients  x_f <- a round of the wrapped algorithm from x
    server   x_c <- x, then steps times:  x_c <- x_c - central rate * g_c(x_c)
    merge    x   <- x + (x_f - x) + (x_c - x)

Central steps go as far as the clients do, unless ``optimizer`` is given: the central
rate times ``steps`` is the clients' mean of rate times steps, times the gain of the
wrapped server (``gain``). Only then, and only with plain steps everywhere, this
minimizes ``w_f f_f + w_c f_c``: a server without a gain, such as Adam, is refused, and
so is clipping around it. With several steps a round x_f and x_c drift apart, and x ends
off the minimizer of the mixture.

Where this differs from the paper: clients descend f_i and not ``w_f f_i``, so that
rates here are w_f times those of the paper. Algorithm 1, in the copy that we have, ends
before the merge, and the text says "merges (e.g., averages)"; here both moves add up,
which is the step of the mixture.

Reference: Augenstein, Hard, Ning, Singhal, Kale, Partridge, Mathews, "Mixed federated
learning: joint decentralized and centralized learning", 2022, arXiv:2205.13655.
"""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Aggregate, Algorithm, Down, PyTree, Shard
from fedblend.local import resolve
from fedblend.transforms.mixed_fl.central_loss import Central
from fedblend.transforms.mixed_fl.step import (
    MixedServer,
    Sent,
    Settings,
    central_steps,
    merging,
    received,
    sending,
    step_sum,
)
from fedblend.transforms.wrapping import is_linear

_CLOCKS = (0, 1, 3, 13, 101, 1009, 10007, 100003)
"""Rounds in which the move must be the same."""
_ROUNDS = 4
"""The number of moves compared: momentum of one factor shows in four."""
_SAME = 1e-5
"""Moves that differ by this fraction of the first are the same, up to rounding."""

Server = Callable[..., tuple[Down, PyTree]]


def parallel(algorithm: Algorithm, g_c: Central, settings: Settings) -> Algorithm:
    """The wrapped algorithm, and central training beside it."""
    merge, steps = merging(settings, "sum"), settings.steps
    optimizer, follows = settings.optimizer, settings.optimizer is None
    if not follows or merge.factors[0] != merge.factors[1]:
        warnings.warn(
            "parallel: central steps or their merging have a rate of their own; unless "
            "rate x steps is that of the clients (times the server's rate), and all "
            "steps are plain and none is clipped, another mixture than "
            f"{tuple(settings.weights)} is minimized",
            stacklevel=4,
        )

    def sent(up):
        wanted = "an optimizer for the central steps"
        return Sent(step_sum(up, wanted)) if follows else Sent()

    def start(params, joins, rows, key):
        down, inner = algorithm.start(params, joins, rows, key)
        return down, MixedServer(inner, merge.rule.init(down.shared))

    def server(aggregate, down, server, rows, key):
        aggregate, sent = received(aggregate)
        after, inner = algorithm.server(aggregate, down, server.inner, rows, key)
        rate = optimizer
        if rate is None:
            found = gain(algorithm.server, aggregate, down, server.inner, rows)
            rate = sent.step_sum / steps * _checked(found, settings)
        rule = resolve(rate, down.round, steps)
        x_c, _ = central_steps(g_c, down.shared, rows, key, rule, steps)
        x, state = merge(down.shared, after.shared, x_c, server.merge)
        return after._replace(shared=x), MixedServer(inner, state)

    needs = algorithm.needs._replace(length=algorithm.needs.length or follows)
    return sending(algorithm, sent)._replace(start=start, server=server, needs=needs)


def _checked(found: float | None, settings: Settings) -> float:
    if found is None:
        raise ValueError(
            "mixed_fl: this server does not move by a constant multiple of the "
            "clients' mean step (Adam, a schedule or clipping), so that parallel would "
            f"minimize another mixture than {tuple(settings.weights)}; use one_way, or "
            "such an optimizer as merge_optimizer over a plain server"
        )
    return found


def gain(
    server: Server,
    aggregate: Aggregate,
    down: Down,
    state: PyTree,
    central: Shard | None,
) -> float | None:
    """The gain of a server: the length of all its moves for a mean step of length 1.

    A server has a gain if its move is linear in the mean step of the clients and the
    same in all rounds. The gain of ``optax.sgd(rate)`` is the rate. With momentum b,
    Nesterov's or not, it is rate / (1 - b): the server repeats a mean step in later
    rounds, b times as long each time. Adam, a clipped mean, a rate that follows a
    schedule and a rate that a sweep traces have no gain, and the result is None.

    The gain is derived when a round is compiled, from the shapes of the arguments.

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
    given = (aggregate, down, state, central)
    try:
        found = np.stack([_moves(server, *given, clock) for clock in _CLOCKS])
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

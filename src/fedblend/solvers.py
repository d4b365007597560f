# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Pure local models: what a client reaches on its own rows, with no communication.

A solver is ``solve(params, shard, key) -> (params, norm)``: the model found from the
given start, and the norm of the full local gradient there. A solver stops when that
norm is at most its tolerance, or when its steps are used up; the norm shows which.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import trees
from fedblend.batch_statistics import refuse_statistics
from fedblend.batches import client_entry, everything, part
from fedblend.checks import (
    OF_TYPE,
    POSITIVE,
    ByClient,
    Count,
    Instance,
    NotNegative,
    Part,
    add_lengths,
    each_client,
    gate,
)
from fedblend.core import Key, Loss, PyTree, Shard
from fedblend.errors import UserError
from fedblend.local import Work, descend
from fedblend.losses import HiddenLoss, gradient, objective

Solver = Callable[[PyTree, Shard, Key], tuple[PyTree, jax.Array]]
SOLVER = Instance(Callable, "a solver, such as fb.solvers.lbfgs(loss)")  # pyright: ignore
"""The rule of ``checks`` for a solver."""
OF_TYPE[Solver] = SOLVER


def given(models: PyTree) -> Solver:
    """Models that are there already, stacked over clients; their norm is unknown."""

    def solve(params: PyTree, shard: Shard, key: Key) -> tuple[PyTree, jax.Array]:
        del params, key
        return client_entry(models, shard), jnp.full((), jnp.nan)

    leaves = jax.tree.leaves(models)
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise UserError(
            "given: models",
            lengths,
            "a tree of arrays over the same clients",
            f"a tree of arrays of the lengths {sorted(lengths)}",
        )
    return add_lengths(solve, (("given: models", lengths.pop()),))


@gate()
def gradient_descent(
    loss: Loss,
    smooth: Annotated[ByClient, each_client(POSITIVE)],
    *,
    tolerance: NotNegative = 1e-6,
    most: Count = 10_000,
) -> Solver:
    """Full gradients with the step ``1 / smooth``.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        smooth: L_i, a number or an array over clients; see ``theory.constants``.
        tolerance: on the norm of the gradient.
        most: steps at most.
    """

    def step(grad, here, state, shard, value):
        del value
        rate = 1 / client_entry(smooth, shard)
        return trees.subtract(here, trees.scale(rate, grad)), state

    return _descent(loss, lambda params: (), step, tolerance, most)


@gate()
def lbfgs(loss: Loss, *, tolerance: NotNegative = 1e-6, most: Count = 1_000) -> Solver:
    """Limited-memory BFGS with a line search, for smooth losses of any size."""
    optimizer = optax.lbfgs()

    def step(grad, here, state, shard, value):
        del shard
        updates, state = optimizer.update(
            grad, state, here, value=value(here), grad=grad, value_fn=value
        )
        return optax.apply_updates(here, updates), state

    return _descent(loss, optimizer.init, step, tolerance, most)


@gate()
def newton(loss: Loss, *, tolerance: NotNegative = 1e-9, most: Count = 50) -> Solver:
    """Newton's method with step halving, for strictly convex losses of some hundreds
    of parameters.
    """

    def step(grad, here, state, shard, value):
        del grad, shard
        point, layout = trees.ravel(here)
        reached = newton_step(
            lambda vector: value(trees.unravel(vector, layout)), point
        )
        return trees.unravel(reached, layout), state

    return _descent(loss, lambda params: (), step, tolerance, most)


def newton_step(value: Callable[[jax.Array], jax.Array], point: jax.Array) -> jax.Array:
    """A step of Newton's method from a vector, halved until it lowers the value."""
    down = jax.grad(value)(point)
    direction = solve_system(jax.hessian(value)(point), down)
    lengths = 0.5 ** jnp.arange(20, dtype=point.dtype)
    tries = jax.vmap(lambda length: value(point - length * direction))(lengths)
    # The longest step that lowers the value by a fair part of what is promised.
    enough = tries <= value(point) - 1e-4 * lengths * jnp.vdot(down, direction)
    best = jnp.where(enough.any(), jnp.argmax(enough), 0)
    return point - lengths[best] * direction


def solve_system(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """The solution of a linear system, which LAPACK does not find in half precision."""
    wide = jnp.promote_types(matrix.dtype, jnp.float32)
    found = jnp.linalg.solve(matrix.astype(wide), vector.astype(wide))
    return found.astype(vector.dtype)


def _descent(
    loss: Loss,
    init: Callable[[PyTree], PyTree],
    step: Callable[..., tuple[PyTree, PyTree]],
    tolerance: float,
    most: int,
) -> Solver:
    """Steps with the full gradient until its norm is small enough."""
    gradient_at = gradient(loss)

    def solve(params: PyTree, shard: Shard, key: Key) -> tuple[PyTree, jax.Array]:
        del key
        refuse_statistics("solvers: full gradients, without fb.Work", params)
        batch = everything(shard)

        def value(here):
            return objective(loss, here, batch)

        def goes_on(carry):
            _, _, grad, count = carry
            return (trees.norm(grad) > tolerance) & (count < most)

        def advance(carry):
            here, state, grad, count = carry
            here, state = step(grad, here, state, shard, value)
            return here, state, gradient_at(here, batch), count + 1

        first = (params, init(params), gradient_at(params, batch), 0)
        here, _, grad, _ = jax.lax.while_loop(goes_on, advance, first)
        return here, trees.norm(grad)

    return solve


class _Best(NamedTuple):
    here: PyTree
    best: PyTree
    score: jax.Array
    waited: Any
    turns: Any


@gate()
def patient_sgd(
    loss: Loss,
    work: Work,
    *,
    validation: Part = 0.2,
    patience: Count = 3,
    turns: Count = 50,
) -> Solver:
    """Stochastic steps until the loss on held-out rows of the client stops falling.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the steps of a turn, after which the loss on held-out rows is measured;
            the optimizer starts anew every turn.
        validation: fraction of the client's training rows held out, of two rows or
            more at least one.
        patience: turns without a better loss after which it stops.
        turns: turns at most.

    The model returned is the best one seen; the norm is that of its full gradient, over
    all rows, and need not be small. A client with a single row has none to hold out: it
    is trained for ``patience`` turns, and that row decides which of them was best.
    """
    gradient_at = gradient(loss)

    def solve(params: PyTree, shard: Shard, key: Key) -> tuple[PyTree, jax.Array]:
        share = part(shard, 0.0, validation).count
        held = jnp.where(shard.count > 1, jnp.clip(share, 1, shard.count - 1), 0)
        seen = dataclasses.replace(
            shard, start=shard.start + held, count=shard.count - held
        )
        judges = jnp.where(held > 0, held, shard.count)
        test = everything(dataclasses.replace(shard, count=judges))

        def advance(now: _Best) -> _Best:
            turn_key = jax.random.fold_in(key, now.turns)
            here, _ = descend(gradient_at, now.here, seen, turn_key, work=work)
            score = objective(loss, here, test)
            # Under noise the loss is unknown, and the last model counts.
            better = (score < now.score) | isinstance(loss, HiddenLoss)
            return _Best(
                here,
                trees.select(better, here, now.best),
                jnp.where(better, score, now.score),
                jnp.where(better & (held > 0), 0, now.waited + 1),
                now.turns + 1,
            )

        first = _Best(params, params, objective(loss, params, test), 0, 0)
        last = jax.lax.while_loop(
            lambda now: (now.waited < patience) & (now.turns < turns), advance, first
        )
        return last.best, trees.norm(gradient_at(last.best, everything(shard)))

    return solve

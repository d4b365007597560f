# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Objectives of the server's own: a loss on rows it holds, or of the parameters alone.

An objective is a function from parameters, the server's rows and a key to its gradient
there, exact or on a random batch. ``central_steps`` descends one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedblend import trees
from fedblend.checks import COUNT, FUNCTION, gate, optional
from fedblend.core import Key, Loss, PyTree, Shard
from fedblend.losses import gradient
from fedblend.shards import draw, everything

Central = Callable[[PyTree, Shard | None, Key], PyTree]


@gate(loss=FUNCTION, batch_size=optional(COUNT))
def on_rows(loss: Loss, batch_size: int | None = None) -> Central:
    """A loss on the server's rows.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        batch_size: rows of a gradient, drawn with replacement; None for all of them.
    """
    slope_at = gradient(loss)

    def mean_gradient(params, central, key):
        if central is None:
            raise ValueError("central: this loss is on rows, and the server has none")
        if batch_size is None:
            return slope_at(params, everything(central))
        if batch_size > central.capacity:
            raise ValueError(
                f"central: a batch of {batch_size} is larger than the server's "
                f"{central.capacity} rows"
            )
        return slope_at(params, draw(central, key, batch_size))

    return mean_gradient


@gate(function=FUNCTION)
def of_parameters(function: Callable[[PyTree], jax.Array]) -> Central:
    """A function of the parameters alone, such as a penalty of embeddings."""

    def mean_gradient(params, central, key):
        del central, key
        return jax.grad(function)(params)

    return mean_gradient


def central_steps(
    slope_of: Callable[[PyTree, Key], PyTree],
    start: PyTree,
    key: Key,
    rule: optax.GradientTransformation,
    steps: int,
    borrowed: PyTree | None,
) -> tuple[PyTree, PyTree]:
    """Where the server's steps lead, and the mean of its own gradients on the way.

    Args:
        slope_of: from parameters and a key to a gradient.
        start: the parameters at first.
        key: of all steps.
        rule: an optimizer, started here.
        steps: how many.
        borrowed: added to every gradient, if not None.
    """

    def step(carry, number):
        here, state, total = carry
        mean_gradient = slope_of(here, jax.random.fold_in(key, number))
        push = trees.add_where_given(mean_gradient, borrowed)
        updates, state = rule.update(push, state, here)
        moved = optax.apply_updates(here, updates)
        return (moved, state, trees.add(total, mean_gradient)), None

    first = (start, rule.init(start), trees.zeros_like(start))
    (reached, _, total), _ = jax.lax.scan(step, first, jnp.arange(steps))
    return reached, trees.scale(1 / steps, total)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The central loss f_c of Mixed FL: on rows of the server, or of the parameters alone.

A central loss is given by its gradient: a function from parameters, the server's rows
and a key to the gradient there, exact or on a random batch.
"""

from collections.abc import Callable
from typing import Annotated

import jax

from fedblend import keys, trees
from fedblend.batch_statistics import is_statistic
from fedblend.batches import draw
from fedblend.checks import COUNT, gate, optional
from fedblend.core import Key, Loss, PyTree, Shard
from fedblend.losses import gradient

Central = Callable[[PyTree, Shard | None, Key], PyTree]
"""``central(params, rows, key)``: the gradient of f_c, or an estimate of it."""


@gate()
def row_loss(
    loss: Loss, batch_size: Annotated[int | None, optional(COUNT)] = None
) -> Central:
    """A loss on the server's rows.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        batch_size: rows of a gradient, drawn with replacement; None for all of them.
    """
    gradient_at = gradient(loss)

    def central(params, rows, key):
        if rows is None:
            raise ValueError("central: this loss is on rows, and the server has none")
        if batch_size is not None and batch_size > rows.capacity:
            raise ValueError(
                f"central: a batch of {batch_size} is larger than the server's "
                f"{rows.capacity} rows"
            )
        batch = draw(rows, key, batch_size)
        return gradient_at(params, batch._replace(key=keys.named(key, "loss")))

    return central


@gate()
def parameter_loss(function: Callable[[PyTree], jax.Array]) -> Central:
    """A function of the parameters alone, such as a penalty of embeddings."""

    def central(params, rows, key):
        return jax.grad(function)(params)

    return central


def weigh(central: Central, weights: tuple[float, float]) -> Central:
    """``w_c / w_f grad f_c``: the central gradient at the rates of clients.

    Clients descend f_f and not ``w_f f_f``, so that the central gradient has the ratio
    of both weights as its factor.

    Args:
        central: the gradient of f_c.
        weights: w_f and w_c, which sum to 1.
    """
    of_clients, of_server = weights
    if abs(of_clients + of_server - 1) > 1e-6 or of_clients <= 0 or of_server < 0:
        raise ValueError(
            f"weights: {tuple(weights)} are not a positive and a nonnegative number "
            "that sum to 1"
        )
    ratio = of_server / of_clients

    def scale(node):
        return node if is_statistic(node) else trees.scale(ratio, node)

    def weighed(params, rows, key):
        slope = central(params, rows, key)
        return jax.tree.map(scale, slope, is_leaf=is_statistic)

    return weighed

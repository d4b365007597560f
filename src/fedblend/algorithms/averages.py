# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Weighted averages of a model over local steps, exact while the model moves on."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import mixing, trees
from fedblend.core import PyTree


class Average(NamedTuple):
    """The average of a model over steps, and the sum of the weights of these steps."""

    model: PyTree
    weight: jax.Array


def extended(past: Average, model: PyTree, weight: jax.Array) -> Average:
    """The average over more steps.

    Args:
        past: the average so far.
        model: the average over the steps since.
        weight: the sum of all weights, ``past.weight`` included.
    """
    old = past.weight / jnp.where(weight > 0, weight, 1)
    return Average(mixing.parameters(old, past.model, model), weight)


def averaging(
    rule: optax.GradientTransformation, weights: jax.Array
) -> optax.GradientTransformation:
    """An optimizer of a pair of trees: a model, and its average over the steps.

    Args:
        rule: the optimizer of the model.
        weights: of the models after each step; the second tree, zeros at first, becomes
            the average of these models.
    """
    shares = weights / weights.sum()

    def init(params):
        return rule.init(params[0]), jnp.zeros((), jnp.int32)

    def update(updates, state, params=None):
        assert params is not None
        inner, count = state
        step, inner = rule.update(updates[0], inner, params[0])
        reached = optax.apply_updates(params[0], step)
        return (step, trees.scale(shares[count], reached)), (inner, count + 1)

    return optax.GradientTransformation(init, update)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Weighted averages over local steps, kept exactly while models move on."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import mixing, trees
from fedblend.core import PyTree


class Averages(NamedTuple):
    """An average over steps, and the sum of the weights that it covers."""

    model: PyTree
    weight: jax.Array


def joined(past: Averages, model: PyTree, weight: jax.Array) -> Averages:
    """The average until the sum of weights is ``weight``.

    Args:
        past: the average so far.
        model: the average over what came since.
        weight: the sum of all weights; ``past.weight`` is a part of it.
    """
    old = past.weight / jnp.where(weight > 0, weight, 1)
    return Averages(mixing.parameters(old, past.model, model), weight)


def averaging(
    rule: optax.GradientTransformation, weights: jax.Array
) -> optax.GradientTransformation:
    """Steps of ``rule`` on the first of a pair of trees; the second sums them up.

    Args:
        rule: the optimizer of the first.
        weights: of the models after each step; the second, zeros at first, becomes
            their average with these weights.
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

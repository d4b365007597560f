# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Gradient descent that finds its own steps and knows when to stop.

Barzilai and Borwein, "Two-point step size gradient methods", IMA Journal of Numerical
Analysis, 1988.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fedblend as fb

TOLERANCE = 1e-2
FIRST_STEP = 1e-3
GROWTH = 1.5
"""A step is at most so many times the one before; the first one is small."""


class Descent(NamedTuple):
    """Where the descent was, its slope there, its step, their number, and the norm."""

    params: Any
    slope: Any
    step: jax.Array
    steps: jax.Array
    norm: jax.Array


def descent(scale: jax.Array | float = 1.0) -> optax.GradientTransformation:
    """Gradient descent until the gradient's norm over ``scale`` is small enough.

    The step is Barzilai and Borwein's shorter one, ``<s, y> / <y, y>`` of the last
    change of the parameters and of the gradient: a server that hears only gradients
    has no losses to search a line with.
    """

    def init(params):
        zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
        return Descent(params, fb.trees.zeros_like(params), zero, none, zero + jnp.inf)

    def update(updates, state, params=None):
        slope = updates
        change = fb.trees.subtract(params, state.params)
        bend = fb.trees.subtract(slope, state.slope)
        products = jax.tree.map(jnp.vdot, change, bend)
        along = abs(jax.tree.reduce(jnp.add, products))
        secant = along / jnp.maximum(fb.trees.squared_norm(bend), 1e-30)
        longer = jnp.minimum(secant, GROWTH * state.step)
        step = jnp.where(state.steps == 0, FIRST_STEP / scale**2, longer)
        norm = jnp.sqrt(fb.trees.squared_norm(slope)) / scale
        after = Descent(params, slope, step, state.steps + 1, norm)
        moved = fb.trees.scale(-step, slope), after
        resting = fb.trees.zeros_like(slope), state._replace(norm=norm)
        change, state = fb.trees.select(norm > TOLERANCE, moved, resting)
        return change, state

    return optax.GradientTransformation(init, update)

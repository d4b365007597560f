# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixing a shared with a personal model; ``alpha`` is the weight of the shared one.

Two mixtures, chosen by passing one of these functions: ``parameters`` (the papers'
mixture, a plain set of parameters again) and ``outputs`` (an ensemble of two models,
which needs no common starting point and doubles the price of a prediction).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend.checks import words
from fedblend.core import PyTree

Apply = Callable[[PyTree, PyTree], jax.Array]
"""``apply(params, inputs) -> outputs``: the forward pass of a model."""


class Blend(NamedTuple):
    """Two models whose outputs are mixed; ``predict`` takes it like parameters."""

    alpha: jax.Array
    shared: PyTree
    personal: PyTree


Mixing = Callable[[jax.Array, PyTree, PyTree], PyTree]
"""``mixing(alpha, shared, personal) -> params or Blend``."""


def parameters(alpha, shared: PyTree, personal: PyTree) -> PyTree:
    """``alpha * shared + (1 - alpha) * personal``, leaf by leaf."""

    def mix(ours, own):
        weight = jnp.asarray(alpha, ours.dtype)
        return weight * ours + (1 - weight) * own

    return jax.tree.map(mix, shared, personal)


def outputs(alpha, shared: PyTree, personal: PyTree) -> Blend:
    """Both models side by side, their outputs mixed at prediction."""
    return Blend(jnp.asarray(alpha, jnp.result_type(float, alpha)), shared, personal)


MIXING = words(parameters=parameters, outputs=outputs)
"""The rule of ``checks`` for a mixture."""


def predict(apply: Apply, model: PyTree, inputs: PyTree) -> jax.Array:
    """The outputs of a model, be it plain parameters or a ``Blend``."""
    if not isinstance(model, Blend):
        return apply(model, inputs)
    ours = apply(model.shared, inputs)
    weight = model.alpha.astype(ours.dtype)
    return weight * ours + (1 - weight) * apply(model.personal, inputs)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A model whose features are shifted by a vector of their own before the last layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend.checks import Instance, gate
from fedblend.core import PyTree
from fedblend.errors import UserError
from fedblend.models.model import Model, Shape, of_halves


class Shifted(NamedTuple):
    """The parameters of a model, and what is added to its features."""

    model: PyTree
    shift: jax.Array


@gate(model=Instance(Model, "a Model"))
def shifted(model: Model, shape: Shape) -> Model:
    """``head(features(inputs) + shift)``, where the shift starts at zero.

    Args:
        model: has its halves, ``features`` and ``head``.
        shape: of the inputs of one row.

    Example:
        >>> from fedblend.models import mlp
        >>> model = shifted(mlp(4, 3, hidden=(8,)), (4,))
        >>> model.init(jax.random.key(0)).shift.shape
        (8,)
    """
    features, head = model.features, model.head
    if features is None or head is None:
        allowed = "a model with its halves, fb.Model(init, apply, features, head)"
        raise UserError("shifted: model", model, allowed, "one without them")

    def init(key):
        params = model.init(key)
        row = jnp.zeros((1, *shape), jnp.result_type(*jax.tree.leaves(params)))
        found = jax.eval_shape(features, params, row)
        return Shifted(params, jnp.zeros(found.shape[1:], found.dtype))

    def own_features(params, inputs):
        return features(params.model, inputs)

    def own_head(params, values):
        return head(params.model, values + params.shift[None])

    return of_halves(init, own_features, own_head)

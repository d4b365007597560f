# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The multilayer perceptron: affine layers with a nonlinearity between them.

The default, two hidden layers of 200 with ReLU, is that of APFL's experiments, without
the dropout and batch normalization of its authors' code, which the paper does not have.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from fedblend.checks import COUNT, gate, words
from fedblend.errors import UserError
from fedblend.models.layers import Affine, affine, flatten, linear
from fedblend.models.model import Model, flat, model

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "gelu": jax.nn.gelu,
}


class Mlp(NamedTuple):
    """The hidden layers in order, and the last one."""

    hidden: tuple[Affine, ...]
    last: Affine


@model("multilayer perceptron, 200-200 with ReLU", flat)
@gate(inputs=COUNT, outputs=COUNT, activation=words(*ACTIVATIONS))
def mlp(
    inputs: int,
    outputs: int,
    *,
    hidden: Sequence[int] = (200, 200),
    activation: str = "relu",
    dtype=jnp.float32,
) -> Model:
    """A multilayer perceptron.

    Args:
        inputs: number of entries of a row.
        outputs: number of scores or values of a row.
        hidden: widths of the hidden layers; an empty list makes the model linear.
        activation: "relu", "tanh", "sigmoid", "softplus" or "gelu".
        dtype: of the parameters.

    Hidden weights start as He's normal under ReLU and GELU and as Glorot's uniform
    otherwise, the last ones as Glorot's; biases start at zero.

    Example:
        >>> import jax
        >>> model = mlp(784, 10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(model.init(jax.random.key(0))))
        199210
    """
    if not isinstance(hidden, Sequence | np.ndarray) or isinstance(hidden, str):
        raise UserError("mlp: hidden", hidden, "a list of widths")
    for place, width in enumerate(hidden):
        COUNT(f"mlp: hidden[{place}]", width)
    glorot = initializers.glorot_uniform()
    start = initializers.he_normal() if activation in ("relu", "gelu") else glorot
    widths = (inputs, *hidden)

    def init(key):
        layers = [
            affine(start, jax.random.fold_in(key, place), before, after, dtype)
            for place, (before, after) in enumerate(pairwise(widths))
        ]
        last = jax.random.fold_in(key, len(layers))
        return Mlp(tuple(layers), affine(glorot, last, widths[-1], outputs, dtype))

    def apply(params, rows):
        here = flatten(rows, params.last.weight.dtype)
        for layer in params.hidden:
            here = ACTIVATIONS[activation](linear(layer, here))
        return linear(params.last, here)

    return Model(init, apply)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models linear in their inputs: softmax and logistic regression.

Both start at zero: their objectives are convex, with the same initial point for all
clients.
"""

import jax.numpy as jnp

from fedblend.checks import COUNT, gate
from fedblend.models.layers import Affine, flatten, linear
from fedblend.models.model import Model, Shape, flat, model


@model("softmax regression, starts at zero", flat)
@gate(inputs=COUNT, classes=COUNT)
def softmax(
    inputs: int, classes: int, *, intercept: bool = True, dtype=jnp.float32
) -> Model:
    """Softmax regression: ``scores = inputs @ weight.T + bias``, one for each class.

    Example:
        >>> import jax
        >>> model = softmax(4, 3)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jax.numpy.ones((2, 4))).shape
        (2, 3)
    """

    def init(key):
        del key
        bias = jnp.zeros((classes,), dtype) if intercept else None
        return Affine(jnp.zeros((classes, inputs), dtype), bias)

    def apply(params, rows):
        return linear(params, flatten(rows, params.weight.dtype))

    return Model(init, apply)


def _one_score(shape: Shape, outputs: int) -> tuple[int]:
    if outputs not in (1, 2):
        raise ValueError(
            f"logistic: {outputs} outputs, it has a single score (1 output, 2 classes)"
        )
    return flat(shape, outputs)[:1]


@model("logistic regression, a single score", _one_score)
@gate(inputs=COUNT)
def logistic(inputs: int, *, intercept: bool = True, dtype=jnp.float32) -> Model:
    """Logistic regression: a single score for each row, positive for class 1.

    Example:
        >>> import jax
        >>> model = logistic(4)
        >>> model.apply(model.init(jax.random.key(0)), jax.numpy.ones((2, 4))).shape
        (2,)
    """
    scores = softmax(inputs, 1, intercept=intercept, dtype=dtype)
    return Model(scores.init, lambda params, rows: scores.apply(params, rows)[:, 0])

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models linear in their inputs: softmax and logistic regression.

Both start at zero, so their objectives are convex with a starting point that is the
same for everybody.
"""

import jax.numpy as jnp

from fedblend.models.layers import Affine, flat, linear
from fedblend.models.model import Model, require_positive


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
    require_positive("softmax", inputs=inputs, classes=classes)

    def init(key):
        del key
        bias = jnp.zeros((classes,), dtype) if intercept else None
        return Affine(jnp.zeros((classes, inputs), dtype), bias)

    def apply(params, rows):
        return linear(params, flat(rows, params.weight.dtype))

    return Model(init, apply)


def logistic(inputs: int, *, intercept: bool = True, dtype=jnp.float32) -> Model:
    """Logistic regression: a single score for each row, positive for class 1.

    Example:
        >>> import jax
        >>> model = logistic(4)
        >>> model.apply(model.init(jax.random.key(0)), jax.numpy.ones((2, 4))).shape
        (2,)
    """
    require_positive("logistic", inputs=inputs)
    scores = softmax(inputs, 1, intercept=intercept, dtype=dtype)
    return Model(scores.init, lambda params, rows: scores.apply(params, rows)[:, 0])

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A model beside a client's own rows: the nearest rows vote on a prediction.

``neighbors(model)`` has the parameters of the model, and its outputs. Where a client
deploys ``mixing.Neighbors``, the model with features and labels of rows, it predicts
probabilities of classes::

    p(y | x) = alpha p_shared(y | x) + (1 - alpha) p_kNN(y | x)
    p_kNN(y | x) = sum over the k nearest rows j with label y of w_j / their sum
    w_j = exp(-d_j^2 / (width * scale))
    d_j = Euclidean distance between the features of x and of row j, width numbers each

A score is the log of that, or the log-odds of class 1 where a model has one score. All
rows at the distance of the k-th vote, so that the order of rows does not matter.
"""

import jax
import jax.numpy as jnp

from fedblend.checks import Instance, gate
from fedblend.errors import UserError
from fedblend.mixing import Neighbors
from fedblend.models.ensemble import OUTPUTS
from fedblend.models.model import Model


def squared_distances(ones: jax.Array, others: jax.Array) -> jax.Array:
    """The squared distances between two sets of vectors, [ones, others]."""
    middle = others.mean(axis=0, keepdims=True)
    ones, others = ones - middle, others - middle
    products = jnp.matmul(ones, others.T, precision="highest")
    lengths = (jnp.square(side).sum(axis=1) for side in (ones, others))
    squares = jnp.add.outer(*lengths) - 2 * products
    return jnp.maximum(squares, 0)


def votes(model: Neighbors, values: jax.Array, classes: int) -> jax.Array:
    """p_kNN at these features, [rows, classes]; equal where a client has no row."""
    counts = jnp.arange(len(model.labels))[None] < model.count
    away = jnp.where(counts, squared_distances(values, model.features), jnp.inf)
    last = jnp.minimum(model.k, jnp.maximum(model.count, 1)) - 1
    limit = jnp.take(jnp.sort(away, axis=1), last, axis=1)
    near = counts & (away <= limit[:, None])
    # Relative to the nearest row: far away from all of them none would have weight.
    ahead = jnp.where(near, away - jnp.min(away, axis=1, keepdims=True), 0)
    unit = model.features.shape[1] * model.scale
    weights = jnp.where(near, jnp.exp(-ahead / unit), 0)
    labels = model.labels > 0 if classes == 2 else model.labels
    found = weights @ jax.nn.one_hot(labels.astype(int), classes, dtype=weights.dtype)
    total = found.sum(axis=1, keepdims=True)
    return jnp.where(total > 0, found / jnp.where(total > 0, total, 1), 1 / classes)


@gate(model=Instance(Model, "a Model"))
def neighbors(model: Model) -> Model:
    """The model, whose predictions the nearest rows of a client may join.

    Args:
        model: has ``features``, and scores of classes.

    Example:
        >>> from fedblend.models import logistic
        >>> model = neighbors(logistic(1))
        >>> rows = jnp.array([[0.0], [1.0]]), jnp.array([0, 1])
        >>> own = Neighbors(jnp.zeros(()), model.init(jax.random.key(0)), *rows,
        ...                 count=jnp.array(2), k=jnp.array(1),
        ...                 scale=jnp.array(1.0))
        >>> (model.apply(own, jnp.array([[0.4], [0.6]])) > 0).tolist()
        [False, True]
    """
    features = model.features
    if features is None:
        allowed = "a model with features, fb.Model(init, apply, features, head)"
        raise UserError("neighbors: model", model, allowed, "one without them")

    def apply(params, inputs):
        if not isinstance(params, Neighbors):
            return model.apply(params, inputs)
        ours = model.apply(params.shared, inputs)
        single = ours.ndim == 1 or ours.shape[1] == 1
        classes = 2 if single else ours.shape[1]
        found = votes(params, features(params.shared, inputs), classes)
        own = jnp.log(jnp.maximum(found, jnp.finfo(found.dtype).tiny))
        if single:
            own = (own[:, 1] - own[:, 0]).reshape(ours.shape)
        weights = jnp.log(jnp.stack([params.alpha, 1 - params.alpha]))
        return OUTPUTS["classes"](weights.astype(ours.dtype), jnp.stack([ours, own]))

    return model._replace(apply=apply)

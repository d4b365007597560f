# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""kNN-Per: a client's nearest training rows join the predictions of the shared model.

No number of its paper is reproduced, no bound of it is checked. It runs in Python
alone: no configuration names it.

Any algorithm trains the shared model, FedAvg in the paper. A client deploys that model
beside the features and labels of its training rows, ``neighbors``::

    p_i(y | x) = alpha_i p_shared(y | x) + (1 - alpha_i) p_kNN,i(y | x)
    alpha_i = the best of 1/grid, 2/grid, ..., 1, by the loss on held-out rows

The paper's weight of the neighbors is ``lam_i = 1 - alpha_i``. Nothing is trained at a
client beyond the shared model, and nothing more is sent.

Where this differs from the paper: the held-out rows are a part of the training rows
that does not vote while alpha_i is chosen, and votes after it; a client without any
deploys the shared model. alpha_i is never 0, so that a class that no neighbor has keeps
a probability. All rows at the distance of the k-th neighbor vote. Votes have the
weights of the authors' code, exp(-distance^2 / (width * scale)) with the width of the
features, at its default scale, so that wide and narrow features need no other scale.
The paper's text has exp(-distance).

A model beside a client's own rows: the nearest rows vote on a prediction.

``neighbors(model)`` has the parameters of the model, and its outputs. Where a client
deploys ``Neighbors``, the model with features and labels of rows, it predicts
probabilities of classes::

    p(y | x) = alpha p_shared(y | x) + (1 - alpha) p_kNN(y | x)
    p_kNN(y | x) = sum over the k nearest rows j with label y of w_j / their sum
    w_j = exp(-d_j^2 / (width * scale))
    d_j = Euclidean distance between the features of x and of row j, width numbers each

A score is the log of that, or the log-odds of class 1 where a model has one score. All
rows at the distance of the k-th vote, so that the order of rows does not matter.

Reference: Marfoq, Neglia, Kameni, Vidal, "Personalized federated learning through local
memorization", ICML 2022, arXiv:2111.09360.
"""

from functools import wraps
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.batches import everything, part
from fedblend.checks import (
    Chance,
    Count,
    Instance,
    Number,
    Positive,
    gate,
)
from fedblend.core import Algorithm, Loss, PyTree, Shard
from fedblend.errors import UserError
from fedblend.losses import objective
from fedblend.mixing import Apply, Blend
from fedblend.models.derived import OUTPUTS
from fedblend.models.model import Model


class Neighbors(NamedTuple):
    """A model beside training rows of a client; see ``neighbors``."""

    alpha: jax.Array
    shared: PyTree
    features: jax.Array
    """Of these rows by that model, [rows, width]; the first ``count`` of them count."""
    labels: jax.Array
    count: jax.Array
    k: jax.Array
    """How many of the rows vote on a prediction."""
    scale: jax.Array
    """Of squared distances in their weights, for each number of a row's features."""


def distances(ones: jax.Array, others: jax.Array) -> jax.Array:
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
    away = jnp.where(counts, distances(values, model.features), jnp.inf)
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

    @wraps(model.apply, assigned=(), updated=())
    def apply(params, inputs, **more):
        if not isinstance(params, Neighbors):
            return model.apply(params, inputs, **more)
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


@gate()
def knn_per(
    algorithm: Algorithm,
    loss: Loss,
    *,
    features: Apply,
    k: Count = 10,
    scale: Positive = 1.0,
    held_out: Chance = 0.2,
    grid: Annotated[int, Number(least=2, whole=True)] = 10,
) -> Algorithm:
    """The wrapped algorithm, deployed with the nearest rows of each client.

    Args:
        algorithm: trains the shared model.
        loss: ``loss(params, rows) -> losses[rows]`` of ``neighbors``.
        features: ``features`` of that model; rows are inputs and labels.
        k: how many rows vote on a prediction.
        scale: of the weights exp(-distance^2 / (width * scale)) of their votes, where
            width is that of the features; a large one makes all k votes equal.
        held_out: fraction of a client's training rows on which alpha is chosen.
        grid: number of alphas to try, from 1/grid to 1.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.tile(jnp.arange(4.0), 10)[:, None], jnp.tile(jnp.arange(2), 20)
        >>> model = neighbors(fb.models.logistic(1))
        >>> loss = fb.losses.logistic(model.apply)
        >>> average = fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=None))
        >>> algorithm = knn_per(
        ...     average, loss, features=model.features, k=5)
        >>> data = fb.federate(rows, [range(40)])
        >>> run = fb.simulate(algorithm, model.init, data, jax.random.key(0), rounds=1)
        >>> own = run.complete().personal(0)
        >>> round(float(own.alpha), 4), (model.apply(own, rows[0][:4]) > 0).tolist()
        (0.1, [False, True, False, True])
    """

    def add_neighbors(model, alpha, shard: Shard):
        inputs, labels = everything(shard).rows
        count = shard.count.astype(jnp.int32)
        found = features(model, inputs)
        votes = jnp.int32(k), jnp.asarray(scale, found.dtype)
        return Neighbors(alpha, model, found, labels, count, *votes)

    def personal(down, client, shard, key):
        model = algorithm.personal(down, client, shard, key)
        if isinstance(model, Blend | Neighbors):
            said, allowed = type(model).__name__, "an algorithm that deploys one model"
            raise UserError("knn_per: algorithm", model, allowed, f"one with a {said}")
        seen, unseen = part(shard, held_out, 1.0), part(shard, 0.0, held_out)
        dtype = jnp.result_type(*jax.tree.leaves(model))
        alphas = jnp.arange(grid, 0, -1).astype(dtype) / grid
        memory = add_neighbors(model, alphas[0], seen)

        def try_alpha(alpha):
            own = memory._replace(alpha=alpha)
            return objective(loss, own, everything(unseen))

        losses = jax.lax.map(try_alpha, alphas)
        best = jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))
        return add_neighbors(model, trees.take(alphas, best), shard)

    return algorithm._replace(personal=personal)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models made from other models: ensembles, shifted features, neighbors, precision.

An ensemble: several models of one kind, whose predictions are averaged with weights.

``ensemble(model, 3)`` is a model again. Its parameters are ``Ensemble(log_weights,
models)``, where ``models`` has the leaves of one model with a leading axis. What is
averaged:

==========  ========================================================================
outputs     prediction, with w = softmax(log_weights)
==========  ========================================================================
"classes"   probabilities: ``log sum_m w_m softmax(scores_m)``; a single score of a row
            is the log-odds of class 1, and stays one
"tags"      the probability of each label by itself, as log-odds
"values"    ``sum_m w_m outputs_m``
==========  ========================================================================

Only the difference of log weights matters, so that they may also be trained. An
ensemble of one model has just its outputs.

A model beside a client's own rows: the nearest rows vote on a prediction.

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

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedblend.checks import COUNT, NOT_NEGATIVE, Instance, gate, words
from fedblend.core import Loss, PyTree
from fedblend.errors import UserError
from fedblend.mixing import Apply, Neighbors
from fedblend.models.model import Model, Shape, join_halves

SPREAD = 0.05
"""As far apart as PyTorch starts linear models of 150 inputs, those of FedEM's data."""


class Ensemble(NamedTuple):
    """The parameters of an ensemble: log weights [models], and the stacked models."""

    log_weights: jax.Array
    models: PyTree


def _mean(log_weights: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.tensordot(jnp.exp(log_weights), values, axes=1)


def _odds(log_weights: jax.Array, scores: jax.Array) -> jax.Array:
    weights = log_weights.reshape(-1, *(1,) * (scores.ndim - 1))
    yes, no = (
        jax.nn.logsumexp(weights + jax.nn.log_sigmoid(side), axis=0)
        for side in (scores, -scores)
    )
    return yes - no


def _classes(log_weights: jax.Array, scores: jax.Array) -> jax.Array:
    if scores.ndim == 2 or scores.shape[-1] == 1:
        return _odds(log_weights, scores)
    weights = log_weights.reshape(-1, *(1,) * (scores.ndim - 1))
    return jax.nn.logsumexp(weights + jax.nn.log_softmax(scores), axis=0)


OUTPUTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "classes": _classes,
    "tags": _odds,
    "values": _mean,
}
"""``mean(log_weights[models], outputs[models, rows, ...]) -> outputs[rows, ...]``."""


@gate(
    model=Instance(Model, "a Model"),
    number=COUNT,
    outputs=words(*OUTPUTS),
    spread=NOT_NEGATIVE,
)
def ensemble(
    model: Model, number: int, *, outputs: str = "classes", spread: float = SPREAD
) -> Model:
    """Several models of one kind, whose predictions are averaged with weights.

    Args:
        model: one of them.
        number: how many there are.
        outputs: "classes", "tags" or "values"; what the outputs of a model are.
        spread: standard deviation of noise on the parameters that ``model.init`` does
            not draw at random, such as those of a linear model: equal models would stay
            equal. The first model has no noise.

    Example:
        >>> three = ensemble(Model(lambda key: jnp.zeros(2), lambda w, x: x @ w), 3)
        >>> params = three.init(jax.random.key(0))
        >>> params.models.shape, three.apply(params, jnp.ones((5, 2))).shape
        ((3, 2), (5,))
    """
    average = OUTPUTS[outputs]

    def init(key):
        keys = jnp.stack([jax.random.fold_in(key, place) for place in range(number)])
        drawn = [model.init(key), *map(model.init, keys[1:])]
        models = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)
        other = model.init(keys[0])

        def apart(place, leaf, one):
            own = jax.random.fold_in(keys[0], place)
            noise = spread * jax.random.normal(own, leaf.shape, leaf.dtype)
            still = (leaf[0] == one).all()
            return leaf + jnp.where(still, noise.at[0].set(0), 0).astype(leaf.dtype)

        leaves, structure = jax.tree.flatten(models)
        pairs = zip(leaves, jax.tree.leaves(other), strict=True)
        moved = [apart(place, *pair) for place, pair in enumerate(pairs)]
        weights = jnp.zeros((number,), jnp.result_type(*leaves))
        return Ensemble(weights, jax.tree.unflatten(structure, moved))

    def apply(params, inputs):
        each = jax.vmap(model.apply, (0, None))(params.models, inputs)
        if len(each) == 1:
            return each[0]
        return average(jax.nn.log_softmax(params.log_weights).astype(each.dtype), each)

    return Model(init, apply)


def single_loss(loss: Loss) -> Loss:
    """The loss of one of the models, as an ensemble by itself."""

    def alone(model, rows):
        dtype = jnp.result_type(*jax.tree.leaves(model))
        own = jax.tree.map(lambda leaf: leaf[None], model)
        return loss(Ensemble(jnp.zeros((1,), dtype), own), rows)

    return alone


def require_ensemble(key: str, params: PyTree) -> int:
    """The number of models of an ensemble; a ``UserError`` for other parameters."""
    if not isinstance(params, Ensemble):
        allowed = "an ensemble of models, fb.models.ensemble(model, 3)"
        raise UserError(key, params, allowed, "one model")
    return len(jax.tree.leaves(params.models)[0])


def models_only(tree: PyTree) -> PyTree:
    """An ensemble without its weights, where these stay with a client."""
    return None if tree is None else tree._replace(log_weights=None)


def set_weights(models: PyTree, weights: jax.Array) -> Ensemble:
    """Stacked models with these weights, of which some may be zero."""
    own = weights.astype(jnp.result_type(*jax.tree.leaves(models)))
    return Ensemble(jnp.log(jnp.maximum(own, jnp.finfo(own.dtype).tiny)), models)


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

    return join_halves(init, own_features, own_head)


Products = Literal["float32", "tf32", "bfloat16"]


@gate(model=Instance(Model, "a Model"), products=words("float32", "tf32", "bfloat16"))
def set_products(model: Model, products: Products) -> Model:
    """The model with matrix products of another precision.

    Parameters, gradients, optimizer and sums over clients keep theirs. "float32" has
    exact products, "tf32" rounds factors to 10 bits on GPUs that can (JAX's default
    there; a CPU has exact ones), and "bfloat16" rounds weights and activations to 8
    bits, on every device.

    Example:
        >>> from fedblend.models import mlp
        >>> model = set_products(mlp(4, 3, hidden=(8,)), "bfloat16")
        >>> params = model.init(jax.random.key(0))
        >>> params.last.weight.dtype, model.apply(params, jnp.ones((2, 4))).dtype
        (dtype('float32'), dtype('float32'))
    """

    def compute(apply: Apply) -> Apply:
        def low(params, inputs):
            leaves = jax.tree.leaves(params)
            own = jnp.result_type(*leaves) if leaves else jnp.float32
            outputs = apply(_cast(params, jnp.bfloat16), _cast(inputs, jnp.bfloat16))
            return _cast(outputs, own)

        def exactly(params, inputs):
            exact = {"float32": "highest", "tf32": "tensorfloat32"}[products]
            with jax.default_matmul_precision(exact):
                return apply(params, inputs)

        return low if products == "bfloat16" else exactly

    features, head = (
        None if half is None else compute(half) for half in (model.features, model.head)
    )
    return model._replace(apply=compute(model.apply), features=features, head=head)


def _cast(tree: PyTree, dtype) -> PyTree:
    """Floating leaves in this dtype."""
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        ),
        tree,
    )


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

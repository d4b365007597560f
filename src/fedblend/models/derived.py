# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models made from other models: ensembles, and other precision.

An ensemble averages the predictions of several models of one kind, with weights.
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
"""

from collections.abc import Callable
from functools import wraps
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.batch_statistics import is_statistic
from fedblend.checks import COUNT, NOT_NEGATIVE, Instance, gate, words
from fedblend.core import Loss, PyTree
from fedblend.errors import UserError
from fedblend.mixing import Apply
from fedblend.models.model import Model

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
        models = trees.stack(drawn)
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

    @wraps(model.apply, assigned=(), updated=())
    def apply(params, inputs, **more):
        each = jax.vmap(lambda one: model.apply(one, inputs, **more))(params.models)
        if len(each) == 1:
            return each[0]
        return average(jax.nn.log_softmax(params.log_weights).astype(each.dtype), each)

    return Model(init, apply)


def single_loss(loss: Loss) -> Loss:
    """The loss of one of the models, as an ensemble by itself."""

    @wraps(loss)
    def alone(model, rows, **more):
        dtype = jnp.result_type(*jax.tree.leaves(model))
        own = jax.tree.map(lambda leaf: leaf[None], model)
        return loss(Ensemble(jnp.zeros((1,), dtype), own), rows, **more)

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
        @wraps(apply, assigned=(), updated=())
        def low(params, inputs, **more):
            leaves = jax.tree.leaves(params)
            own = jnp.result_type(*leaves) if leaves else jnp.float32
            low = (_cast(tree, jnp.bfloat16) for tree in (params, inputs))
            return _cast(apply(*low, **more), own)

        @wraps(apply, assigned=(), updated=())
        def exactly(params, inputs, **more):
            exact = {"float32": "highest", "tf32": "tensorfloat32"}[products]
            with jax.default_matmul_precision(exact):
                return apply(params, inputs, **more)

        return low if products == "bfloat16" else exactly

    features, head = (
        None if half is None else compute(half) for half in (model.features, model.head)
    )
    return model._replace(apply=compute(model.apply), features=features, head=head)


def _cast(tree: PyTree, dtype) -> PyTree:
    """Floating leaves in this dtype; statistics of batches keep theirs."""

    def cast(leaf):
        if is_statistic(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.astype(dtype)

    return jax.tree.map(cast, tree, is_leaf=is_statistic)

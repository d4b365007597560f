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
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

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

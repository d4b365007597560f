# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixing a shared with a personal model; ``alpha`` is the weight of the shared one.

Four mixtures, chosen by passing one of these functions: ``parameters`` (the papers'
mixture, a plain set of parameters again), ``only(paths)`` (the same for a part of the
model, whose other parameters are the shared ones), ``outputs`` (an ensemble of two
models, which needs no common starting point and doubles the price of a prediction) and
``products`` (of adapters of low rank: the mixture of the two models' weights).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.batch_statistics import is_statistic
from fedblend.checks import OF_TYPE, PATHS, Words
from fedblend.core import PyTree

Apply = Callable[..., jax.Array]
"""``apply(params, inputs) -> outputs``: the forward pass of a model.

One that differs in training has parameters ``key=None`` and ``mask=None``, see
``core.Loss``.
"""


class Blend(NamedTuple):
    """Two models whose outputs are mixed; ``predict`` takes it like parameters."""

    alpha: jax.Array
    shared: PyTree
    personal: PyTree


Mixing = Callable[[jax.Array, PyTree, PyTree], PyTree]
"""``mixing(alpha, shared, personal) -> params or Blend``."""


def parameters(alpha, shared: PyTree, personal: PyTree) -> PyTree:
    """``alpha * shared + (1 - alpha) * personal``, leaf by leaf.

    How statistics of batches follow the rows says nothing about ``alpha``, which has no
    gradient of theirs.
    """

    def mix(ours, own):
        if is_statistic(ours):
            return jax.tree.map(partial(mean, jax.lax.stop_gradient(alpha)), ours, own)
        return mean(alpha, ours, own)

    def mean(alpha, ours, own):
        weight = jnp.asarray(alpha, ours.dtype)
        return weight * ours + (1 - weight) * own

    return jax.tree.map(mix, shared, personal, is_leaf=is_statistic)


def products(alpha, shared: PyTree, personal: PyTree) -> PyTree:
    """The adapter whose model has ``alpha * shared + (1 - alpha) * personal`` weights.

    The change of a weight that two factors make is B A: its mixture is that of the
    products, ``alpha B_s A_s + (1 - alpha) B_p A_p``, which has factors of both ranks
    together, [A_s; A_p] and [alpha B_s, (1 - alpha) B_p]. Mixing the factors as
    ``parameters`` does would add products of one model's A with the other's B. Other
    changes of weights are sums, where both are the same. ``gated_lora`` and ``prefix``
    change no weights, and no adapter is their mixture.

    Example:
        >>> ours = {"weight": {"a": jnp.ones((2, 3)), "b": jnp.ones((4, 2))}}
        >>> jax.tree.map(jnp.shape, products(0.5, ours, ours))
        {'weight': {'a': (4, 3), 'b': (4, 4)}}
    """

    def mix(ours, own):
        if not _has_factors(ours):
            return parameters(alpha, ours, own)
        weight = jnp.asarray(alpha, ours["b"].dtype)
        return _side_by_side(
            ours | {"b": weight * ours["b"]}, own | {"b": (1 - weight) * own["b"]}
        )

    return jax.tree.map(
        mix,
        shared,
        personal,
        is_leaf=lambda node: _has_factors(node) or is_statistic(node),
    )


def sum_of_changes(one: PyTree, other: PyTree) -> PyTree:
    """The adapter whose change of each weight is the sum of those of two adapters."""

    def add(one, other):
        return _side_by_side(one, other) if _has_factors(one) else one + other

    return jax.tree.map(add, one, other, is_leaf=_has_factors)


def _has_factors(node: Any) -> bool:
    """Whether a part of an adapter is a product of two factors."""
    return isinstance(node, dict) and node.keys() == {"a", "b"}


def _side_by_side(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Factors whose product is the sum of two products: the rank is that of both."""
    return {
        "a": jnp.concatenate([one["a"], other["a"]], axis=0),
        "b": jnp.concatenate([one["b"], other["b"]], axis=-1),
    }


def outputs(alpha, shared: PyTree, personal: PyTree) -> Blend:
    """Both models side by side, their outputs mixed at prediction."""
    return Blend(jnp.asarray(alpha, jnp.result_type(float, alpha)), shared, personal)


def only(personal: Callable[[str], bool] | Sequence[str]) -> Mixing:
    """``parameters`` in a part of the model; its other parameters are the shared ones.

    Args:
        personal: names of the parts of the model that are mixed, such as ["last"]; or a
            function of a path, such as "last/weight".

    Example:
        >>> mix = only(["last"])
        >>> shared = {"body": jnp.ones(1), "last": jnp.ones(1)}
        >>> mixed = mix(0.5, shared, trees.scale(3, shared))
        >>> {name: leaf.tolist() for name, leaf in mixed.items()}
        {'body': [1.0], 'last': [2.0]}
    """
    is_mixed = PATHS("only: personal", personal)

    def mix(alpha, shared: PyTree, personal: PyTree) -> PyTree:
        return trees.map_with_path(
            lambda path, ours, own: (
                parameters(alpha, ours, own) if is_mixed(path) else ours
            ),
            shared,
            personal,
            is_leaf=is_statistic,
        )

    return mix


class _Mixtures(Words):
    """A rule: a mixture; the names of parts of a model stand for ``only`` of them."""

    def __call__(self, key: str, value: Any) -> Mixing:
        """The mixture."""
        if isinstance(value, list | tuple):
            return only(PATHS(key, value))
        return super().__call__(key, value)


_WORDS = {"parameters": parameters, "outputs": outputs, "products": products}
MIXING = _Mixtures(tuple(_WORDS), _WORDS)
"""The rule of ``checks`` for a mixture."""
OF_TYPE[Mixing] = MIXING


def predict(apply: Apply, model: PyTree, inputs: PyTree, **more: Any) -> jax.Array:
    """The outputs of a model, be it plain parameters or a ``Blend``.

    Args:
        apply: the forward pass.
        model: what it takes.
        inputs: of rows.
        more: key and mask of a training step, for an ``apply`` that takes them.
    """
    if not isinstance(model, Blend):
        return apply(model, inputs, **more)
    ours = apply(model.shared, inputs, **more)
    weight = model.alpha.astype(ours.dtype)
    return weight * ours + (1 - weight) * apply(model.personal, inputs, **more)


def shapes_of(arrays: Mapping[str, Any], params: PyTree) -> PyTree:
    """The shapes and dtypes of a model: of parameters, or a ``Blend``.

    Args:
        arrays: the leaves of the model by name.
        params: the shapes and dtypes of the parameters.
    """
    own = {
        name.removeprefix("."): jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        for name, leaf in arrays.items()
    }
    if "alpha" in own:
        return Blend(own["alpha"], params, params)  # pyright: ignore

    def match_rank(path, leaf):
        """The leaf, or that of a mixture of products, whose rank is twice as large."""
        name = jax.tree_util.keystr(path)
        twice = {
            "['a']": (2 * leaf.shape[0], *leaf.shape[1:]) if leaf.shape else (),
            "['b']": (*leaf.shape[:-1], 2 * leaf.shape[-1]) if leaf.shape else (),
        }
        known = own.get(name)
        if known is None or known.shape != twice.get(name[-5:]):
            return leaf
        return jax.ShapeDtypeStruct(known.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(match_rank, params)

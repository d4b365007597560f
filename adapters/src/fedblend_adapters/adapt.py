# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a model to one whose parameters are a small change of a frozen base.

The base is an array that everything refers to: there is one, however many clients,
replicas and programs there are. What an algorithm sees are the parameters of the change
alone, so that these are what is trained, mixed, compressed, counted and stored.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.batch_statistics import refuse_statistics
from fedblend.checks import Instance, gate, matches, words
from fedblend.core import PyTree
from fedblend.errors import SettingError, UserError
from fedblend.mixing import Apply, sum_of_changes
from fedblend.models.model import Model
from fedblend.trees import leaves_by_path
from fedblend_adapters.evaluate import evaluate
from fedblend_adapters.kinds import Change, Full, How, PrefixKind
from fedblend_adapters.transformer_layers import Prefixed
from fedblend_adapters.uses import WeightUse, uses_of
from fedblend_adapters.weight import Labeled, Weight, plain

BaseDtype = Literal["float32", "float16", "bfloat16", "int8"]
"""How a base is kept; None keeps it as it is given."""
LARGEST = 127
"""Whole numbers of 8 bits go so far, to both sides."""
Where = Callable[[str], bool] | str | Sequence[str] | None
"""Which weights: a function of a path, or patterns such as "layers/*/query"."""


class Quantized(NamedTuple):
    """A weight as whole numbers of 8 bits, and the step of each row."""

    entries: jax.Array
    steps: jax.Array
    """Of the shape of the weight without its last axis."""


def quantize(weight: jax.Array) -> Quantized:
    """The nearest multiples of a step; each row of the last axis has its own.

    Example:
        >>> found = quantize(jnp.array([[0.5, 1.27], [0.0, 0.0]]))
        >>> found.entries.tolist(), round(float(found.steps[0]), 4)
        ([[50, 127], [0, 0]], 0.01)
    """
    largest = jnp.abs(weight).max(axis=-1)
    steps = jnp.where(largest > 0, largest / LARGEST, 1).astype(weight.dtype)
    entries = jnp.round(weight / steps[..., None]).astype(jnp.int8)
    return Quantized(entries, steps)


class Base(NamedTuple):
    """The parameters of a base as they are kept, by path, and as they are used."""

    leaves: dict[str, jax.Array | Quantized]
    shapes: PyTree


def freeze(params: PyTree, dtype: BaseDtype | None) -> Base:
    """The base in this precision.

    Args:
        params: of the model.
        dtype: the model computes in it; "int8" keeps weights of two axes or more in 8
            bits, and computes in the precision that they have.
    """

    def kept(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if dtype == "int8":
            return quantize(leaf) if leaf.ndim > 1 else leaf
        return leaf.astype(dtype)

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        used = leaf.steps.dtype if isinstance(leaf, Quantized) else leaf.dtype
        whole = leaf.entries if isinstance(leaf, Quantized) else leaf
        return jax.ShapeDtypeStruct(whole.shape, used)

    refuse_statistics("adapt: base", params)
    leaves = {path: kept(leaf) for path, leaf in leaves_by_path(params).items()}
    structure = jax.tree.structure(params)
    return Base(leaves, structure.unflatten(map(shape, leaves.values())))


def _dtype(key: str, value: Any) -> Any:
    return value if value is None else words(*get_args(BaseDtype))(key, value)


@gate(
    model=Instance(Model, "a Model"),
    how=Instance(get_args(How), "a kind of change, such as fb.adapt.lora(8)"),
    dtype=_dtype,
)
def adapt(
    model: Model,
    base: PyTree | None = None,
    *,
    how: How,
    inputs: PyTree,
    where: Where = None,
    dtype: BaseDtype | None = None,
) -> Model:
    """The model with a frozen base, and a change of it as its parameters.

    Args:
        model: any: of this package, of another framework, or a pair of functions.
        base: its parameters, which stay as they are; ``model.init(key 0)`` if None,
            which for a module of another framework are those that it has.
        how: the kind of change: ``lora(rank)``, ``gated_lora(rank)``, ``ia3()``,
            ``bias()``, ``full()`` or ``prefix(length)``.
        inputs: some rows, or their shapes; they are not computed with.
        where: the weights that are changed: patterns of paths such as "layers/*", names
            of layers, or a function of a path. The usual ones of ``how`` if None; for
            ``lora`` and ``ia3`` all weights that the data is multiplied with, but for
            the head and tables of embeddings.
        dtype: "bfloat16", "float16" or "float32": what the base is kept, and the model
            computed, in; "int8": what weights are kept in, with a step for each row.
            The parameters of the change are float32, and outputs at least that.

    Example:
        >>> from fedblend.models import mlp
        >>> from fedblend_adapters.kinds import lora
        >>> rows = jnp.ones((2, 4))
        >>> model = mlp(4, 3, hidden=(8,))
        >>> adapted = adapt(model, how=lora(2), inputs=rows)
        >>> params = adapted.init(jax.random.key(1))
        >>> jax.tree.map(jnp.shape, params)
        {'hidden/0/weight': {'a': (2, 4), 'b': (8, 2)}}
        >>> start = model.apply(model.init(jax.random.key(0)), rows)
        >>> bool((adapted.apply(params, rows) == start).all())
        True
    """
    frozen = freeze(_check_base(model, base), dtype)
    if isinstance(how, PrefixKind):
        return _add_prefix(model, frozen, how, where)
    uses = uses_of(model, frozen.shapes, inputs)
    chosen = {path: uses[path] for path in _choose_weights(how, uses, where)}
    fixed = {path: how.constants(path, use) for path, use in chosen.items()}

    def init(key):
        return {path: how.init(key, path, use) for path, use in chosen.items()}

    def weights(params):
        return [
            _weight(leaf, how, params[path] | fixed[path], chosen[path])
            if path in chosen
            else _weight(leaf)
            for path, leaf in frozen.leaves.items()
        ]

    def wrap(function: Apply | None) -> Any:
        def compute(params, inputs, **more):
            return _evaluate(function, frozen, weights(params), inputs, **more)

        return (
            None
            if function is None
            else wraps(function, assigned=(), updated=())(compute)
        )

    halves = wrap(model.features), wrap(model.head)
    return Model(init, wrap(model.apply), *halves)


def _check_base(model: Model, base: PyTree | None) -> PyTree:
    """The base, if it has the structure and shapes of the model's parameters."""
    key = jax.random.key(0)
    if base is None:
        return model.init(key)
    wanted = leaves_by_path(jax.eval_shape(model.init, key))
    given = leaves_by_path(base)
    for path, leaf in wanted.items():
        if path not in given:
            raise SettingError("adapt: base", f"lacks {path!r}, which the model has")
        if jnp.shape(given[path]) != leaf.shape:
            raise SettingError(
                f"adapt: base: {path}",
                f"has the shape {jnp.shape(given[path])}, the model's {leaf.shape}",
            )
    for path in given:
        if path not in wanted:
            raise SettingError("adapt: base", f"has {path!r}, which the model lacks")
    return base


def _choose_weights(how: Change, uses: dict[str, WeightUse], where: Where) -> list[str]:
    """The paths of the weights that are changed."""
    able = [path for path, use in uses.items() if how.takes(use)]
    if where is None:
        found = [path for path in able if how.usual(uses[path])]
    else:
        found = list(filter(_pattern(where), able))
    if not found:
        known = ", ".join(able) or "none"
        said = "the usual weights" if where is None else None
        raise UserError("adapt: where", where, f"some of {known}", said)
    return found


def _pattern(where: Any) -> Callable[[str], Any]:
    if callable(where):
        return where
    names = [where] if isinstance(where, str) else where
    strings = isinstance(names, list | tuple) and all(
        isinstance(name, str) for name in names
    )
    if not strings:
        allowed = "patterns of paths, or a function of a path"
        raise UserError("adapt: where", where, allowed)
    return lambda path: any(matches(name, path) for name in names)


def _weight(
    leaf: jax.Array | Quantized,
    how: Change | None = None,
    params: dict[str, jax.Array] | None = None,
    use: WeightUse | None = None,
) -> Any:
    """A leaf of the base as ``evaluate`` takes it."""
    whole = leaf.entries if isinstance(leaf, Quantized) else leaf
    axes = tuple(range(whole.ndim))
    steps = Labeled(leaf.steps, axes[:-1]) if isinstance(leaf, Quantized) else None
    if how is None or params is None or use is None:
        return leaf if steps is None else Weight(Labeled(whole, axes), {}, None, steps)
    found = Weight(Labeled(whole, axes), how.parts(params, use), how, steps)
    # Every operation needs the sum of a full change: it is made once.
    return found.merge("") if isinstance(how, Full) else found


def _add_prefix(model: Model, base: Base, how: PrefixKind, where: Where) -> Model:
    """The model with learned keys and values before those of each row."""
    make = model.prefix
    if make is None:
        allowed = "for a model with attention that has Model.prefix, as transformer has"
        raise UserError("adapt: how", how, allowed)
    if where is not None:
        raise SettingError("adapt: where", "is not for prefix, which changes no weight")
    kept = [_weight(leaf) for leaf in base.leaves.values()]

    def wrap(function: Apply | None) -> Any:
        def compute(params, inputs, **more):
            def own(base, given, **more):
                prefix, inputs = given
                return function(Prefixed(base, prefix), inputs, **more)  # pyright: ignore

            return _evaluate(own, base, kept, (params, inputs), **more)

        return (
            None
            if function is None
            else wraps(function, assigned=(), updated=())(compute)
        )

    halves = wrap(model.features), wrap(model.head)
    return Model(lambda key: make(key, how.length), wrap(model.apply), *halves)


def _evaluate(
    function: Any, base: Base, weights: Sequence[Any], inputs: PyTree, **more: Any
) -> PyTree:
    """A function of parameters and inputs, with these weights as its parameters."""
    trace = jax.make_jaxpr(partial(function, **more), return_shape=True)
    program, shape = trace(base.shapes, inputs)
    given = [*weights, *map(jnp.asarray, jax.tree.leaves(inputs))]
    found = evaluate(program.jaxpr, program.consts, given)
    outputs = [_promote(plain(one)) for one in found]
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def _promote(output: jax.Array) -> jax.Array:
    """Losses are not computed in less."""
    if not jnp.issubdtype(output.dtype, jnp.floating):
        return output
    return output.astype(jnp.promote_types(output.dtype, jnp.float32))


@gate(model=Instance(Model, "a Model"))
def two_adapters(model: Model) -> Model:
    """The model whose change of the base is the sum of two.

    Its parameters are ``{"shared": adapter, "personal": adapter}``: methods with a
    personal part, such as ``fedalt(..., personal=["personal"])``, keep the second one
    at the client.

    Args:
        model: what ``adapt`` returned, with a change of weights: ``gated_lora`` has two
            adapters of its own, and a sum of prefixes is no sum of changes.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.ones((2, 4))
        >>> plain = fb.models.mlp(4, 3, hidden=(8,))
        >>> one = fb.adapt.adapt(plain, how=fb.adapt.lora(2), inputs=rows)
        >>> model = two_adapters(one)
        >>> sorted(model.init(jax.random.key(0)))
        ['personal', 'shared']
    """

    def init(key):
        own = model.init(keys.named(key, "personal"))
        return {"shared": model.init(key), "personal": own}

    def wrap(function: Apply | None) -> Apply | None:
        def compute(params, inputs, **more):
            whole = sum_of_changes(params["shared"], params["personal"])
            return function(whole, inputs, **more)  # pyright: ignore

        return (
            None
            if function is None
            else wraps(function, assigned=(), updated=())(compute)
        )

    halves = wrap(model.features), wrap(model.head)
    return Model(init, wrap(model.apply), *halves)  # pyright: ignore

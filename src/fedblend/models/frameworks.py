# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models written with Flax NNX, Equinox or Keras, as a pair of functions.

The frameworks are optional, and imported only when their function is called. The
parameters become a plain dictionary from a path ("layers/0/weight") to an array, which
everything that mixes, compresses or stores parameters can use.

Modules are in evaluation mode, in training too. A module with dropout is refused unless
``dropout="off"`` says that it is to be trained without. Modules with state besides
parameters and random keys (the running means of batch normalization, caches) are
refused, since it would be neither trained nor shared. The module determines the dtype
of the parameters.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import jax

from fedblend.core import PyTree
from fedblend.errors import InputError, SettingError, UserError
from fedblend.models.model import Model

Off = Literal["off"] | None
"""Whether a module with dropout is trained without it; None refuses such a module."""


def from_flax(source: Any, *, dropout: Off = None) -> Model:
    """A model from a Flax NNX module.

    Args:
        source: a function from ``nnx.Rngs`` to a module, or a module, whose present
            parameters are then what ``init`` returns for every key.
        dropout: "off" for a module with dropout, which is then left out; None refuses
            such a module.

    Example:
        >>> from flax import nnx
        >>> model = from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        >>> sorted(model.init(jax.random.key(0)))
        ['bias', 'kernel']
    """
    from flax import nnx

    given = isinstance(source, nnx.Module)
    if not given:
        _refuse_others("from_flax", source)

    def module_of(key):
        return nnx.clone(source) if given else source(nnx.Rngs(key))

    module = module_of(jax.random.key(0))
    if not isinstance(module, nnx.Module):
        _refuse_made("from_flax", source, module)
    drops = [
        "/".join(map(str, path))
        for path, part in nnx.iter_graph(module)
        if isinstance(part, nnx.Dropout) and part.rate > 0
    ]
    _refuse_dropout("from_flax", module, drops, dropout)
    module.eval()
    graph, params, random, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    state = nnx.to_flat_state(rest)
    if state:
        path, variable = next(iter(state))
        kind = type(variable).__name__
        what = "BatchNorm's batch statistics" if kind == "BatchStat" else f"a {kind}"
        raise ValueError(
            f"from_flax: {type(module).__name__} has {what} at "
            f"{'/'.join(map(str, path))}, only parameters can be mixed and averaged; "
            "normalize within an example instead (LayerNorm, GroupNorm)"
        )
    name, restore = _by_path(params, holder="/value")

    def apply(params, inputs):
        return nnx.merge(graph, restore(params), random)(inputs)

    return Model(lambda key: name(nnx.state(module_of(key), nnx.Param)), apply)


def from_equinox(source: Any, *, dropout: Off = None) -> Model:
    """A model from an Equinox module, whose call takes one row.

    Args:
        source: a function from a key to a module, or a module, whose present
            parameters are then what ``init`` returns for every key. All floating
            arrays are parameters; everything else is that of the module made with key
            0.
        dropout: "off" for a module with dropout, which is then left out; None refuses
            such a module.

    Example:
        >>> import equinox
        >>> model = from_equinox(lambda key: equinox.nn.Linear(4, 3, key=key))
        >>> sorted(model.init(jax.random.key(0)))
        ['bias', 'weight']
    """
    import equinox

    given = isinstance(source, equinox.Module)
    if not given:
        _refuse_others("from_equinox", source)

    def module_of(key):
        return source if given else source(key)

    module = module_of(jax.random.key(0))
    first = module[0] if isinstance(module, tuple) else module
    if not isinstance(first, equinox.Module):
        _refuse_made("from_equinox", source, module)
    layer = equinox.nn.Dropout
    places, _ = jax.tree_util.tree_flatten_with_path(
        module, is_leaf=lambda node: isinstance(node, layer)
    )
    drops = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, part in places
        if isinstance(part, layer)
        and not (isinstance(part.p, int | float) and not part.p)
    ]
    _refuse_dropout("from_equinox", module, drops, dropout)
    module = equinox.nn.inference_mode(module)
    states = (equinox.nn.StateIndex, equinox.nn.State)
    nodes = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, states))
    if any(isinstance(node, states) for node in nodes):
        raise ValueError(
            f"from_equinox: {type(first).__name__} has state between calls, as "
            "BatchNorm does, only parameters can be mixed and averaged; normalize "
            "within an example instead (LayerNorm, GroupNorm)"
        )
    params, static = equinox.partition(module, equinox.is_inexact_array)
    name, restore = _by_path(params)

    def init(key):
        return name(equinox.filter(module_of(key), equinox.is_inexact_array))

    def apply(params, inputs):
        return jax.vmap(equinox.combine(restore(params), static))(inputs)

    return Model(init, apply)


def from_keras(model: Any, *, dropout: Off = None) -> Model:
    """A model from a Keras 3 model that is built, with JAX as its backend.

    Args:
        model: whose present parameters are what ``init`` returns for every key.
        dropout: "off" for a model with dropout, which is then left out; None refuses
            such a model.
    """
    import keras

    if keras.backend.backend() != "jax":
        raise InputError(
            f"from_keras: the backend of Keras is {keras.backend.backend()}; set the "
            "environment variable KERAS_BACKEND=jax before Keras is imported"
        )
    if not isinstance(model, keras.Model):
        raise UserError("from_keras: model", model, "a keras.Model", _kind(model))
    if not model.built:
        raise InputError(
            f"from_keras: {model.name} has no weights yet; give it keras.Input(shape), "
            "or call it on some rows first"
        )
    drops = [one.name for one in _layers(model) if _drops(one)]
    _refuse_dropout("from_keras", model, drops, dropout)
    seeds = [one.path for one in model.non_trainable_variables if "seed" in one.path]
    states = [one.path for one in model.non_trainable_variables]
    if set(states) - set(seeds):
        first = next(path for path in states if path not in seeds)
        raise InputError(
            f"from_keras: {model.name} has state at {first}, as BatchNormalization "
            "does, only parameters can be mixed and averaged; normalize within an "
            "example instead (LayerNormalization, GroupNormalization)"
        )
    start = {one.path: one.value for one in model.trainable_variables}
    rest = [one.value for one in model.non_trainable_variables]

    def apply(params, inputs):
        own = [params[path] for path in start]
        return model.stateless_call(own, rest, inputs, training=False)[0]

    return Model(lambda key: dict(start), apply)


def _layers(model: Any) -> Iterator[Any]:
    """The layers of a Keras model, and those of models in it."""
    for one in model.layers:
        yield one
        if hasattr(one, "layers"):
            yield from _layers(one)


def _drops(layer: Any) -> bool:
    rates = (getattr(layer, name, 0) for name in ("rate", "dropout"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


_NEEDED = "a module, or a function that makes one"


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _refuse_torch(caller: str, source: Any) -> None:
    """Refuse modules of PyTorch, and classes of them; another function takes them."""
    kinds = (type(source), source if isinstance(source, type) else object)
    homes = {one.__module__ for kind in kinds for one in kind.__mro__}
    if "torch.nn.modules.module" in homes:
        raise SettingError(
            f"{caller}: source",
            "is a module of PyTorch; fb.models.from_torch takes it",
        )


def _refuse_others(caller: str, source: Any) -> None:
    """Refuse what is neither a module of the framework nor a function."""
    _refuse_torch(caller, source)
    if not callable(source):
        raise UserError(f"{caller}: source", source, _NEEDED, _kind(source))


def _refuse_made(caller: str, source: Any, made: Any) -> NoReturn:
    """Refuse a function that returns no module of the framework."""
    _refuse_torch(caller, made)
    returned = f"a function that returns {_kind(made)}"
    raise UserError(f"{caller}: source", source, _NEEDED, returned)


def _refuse_dropout(caller: str, module: Any, places: list[str], dropout: Off) -> None:
    if dropout not in ("off", None):
        raise UserError(f"{caller}: dropout", dropout, '"off" or None')
    if places and dropout is None:
        raise InputError(
            f"{caller}: {type(module).__name__} uses dropout, at {places[0]}; a model "
            'of fedblend computes the same in training and evaluation: dropout="off" '
            "trains without it"
        )


def _by_path(
    tree: PyTree, holder: str = ""
) -> tuple[Callable[[PyTree], dict[str, jax.Array]], Callable[[dict], PyTree]]:
    """Functions from a tree of this structure to a dictionary by path, and back.

    ``holder`` is the suffix that a framework's wrapper of an array adds to the path.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    full = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in paths]
    names = [path.removesuffix(holder) for path in full]

    def name(tree):
        return dict(zip(names, jax.tree.leaves(tree), strict=True))

    def restore(params):
        return jax.tree.unflatten(structure, [params[name] for name in names])

    return name, restore

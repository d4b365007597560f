# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Modules of Flax NNX, Equinox and Keras as models; those of PyTorch by their module.

The frameworks are optional, and imported only when their function is called. The
parameters become a plain dictionary from a path ("layers/0/weight") to an array, which
everything that mixes, compresses or stores parameters can use.

Modules are in evaluation mode, in training too. A module with dropout is refused unless
``dropout="off"`` says that it is to be trained without. Modules with state besides
parameters and random keys (the running means of batch normalization, caches) are
refused, since it would be neither trained nor shared. The module determines the dtype
of the parameters.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fedblend.checks import gate
from fedblend.core import Key, PyTree
from fedblend.errors import InputError, SettingError, UserError
from fedblend.models.model import Model, Shape, describe
from fedblend.trees import leaves_by_path
from fedblend_interop.torch_module import from_torch
from fedblend_interop.torch_module import state_dict as state_dict
from fedblend_interop.torch_module import to_torch as to_torch
from fedblend_interop.torch_program import ExampleError
from fedblend_interop.torch_training import Off, refuse_dropout


@gate()
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

    def draw(key: Key) -> Any:
        given = isinstance(source, nnx.Module)
        return nnx.clone(source) if given else source(nnx.Rngs(key))

    module = _first_module("from_flax", source, nnx.Module, draw)
    drops = [
        "/".join(map(str, path))
        for path, part in nnx.iter_graph(module)
        if isinstance(part, nnx.Dropout) and part.rate > 0
    ]
    module.eval()
    graph, params, random, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    states = [
        f"a {type(variable).__name__} at {'/'.join(map(str, path))}"
        for path, variable in nnx.to_flat_state(rest)
    ]
    _refuse("from_flax", type(module).__name__, dropout, drops, states)
    name, restore = _naming(params, holder="/value")

    def apply(params, inputs):
        return nnx.merge(graph, restore(params), random)(inputs)

    return Model(lambda key: name(nnx.state(draw(key), nnx.Param)), apply)


@gate()
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

    def draw(key: Key) -> Any:
        return source if isinstance(source, equinox.Module) else source(key)

    module = _first_module("from_equinox", source, equinox.Module, draw)
    layer = equinox.nn.Dropout
    kinds = (layer, equinox.nn.StateIndex, equinox.nn.State)
    parts, _ = jax.tree_util.tree_flatten_with_path(
        module, is_leaf=lambda node: isinstance(node, kinds)
    )
    drops = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, part in parts
        if isinstance(part, layer)
        and not (isinstance(part.p, int | float) and not part.p)
    ]
    states = ["state between calls" for _, part in parts if isinstance(part, kinds[1:])]
    first = module[0] if isinstance(module, tuple) else module
    _refuse("from_equinox", type(first).__name__, dropout, drops, states)
    module = equinox.nn.inference_mode(module)
    params, static = equinox.partition(module, equinox.is_inexact_array)
    name, restore = _naming(params)

    def init(key):
        return name(equinox.filter(draw(key), equinox.is_inexact_array))

    def apply(params, inputs):
        return jax.vmap(equinox.combine(restore(params), static))(inputs)

    return Model(init, apply)


@gate()
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
        raise UserError("from_keras: model", model, "a keras.Model", describe(model))
    if not model.built:
        raise InputError(
            f"from_keras: {model.name} has no weights yet; give it keras.Input(shape), "
            "or call it on some rows first"
        )
    drops = [
        layer.name
        for layer in _layers(model)
        for rate in (getattr(layer, name, 0) for name in ("rate", "dropout"))
        if isinstance(rate, int | float) and rate > 0
    ]
    rest = model.non_trainable_variables
    states = [f"state at {one.path}" for one in rest if "seed" not in one.path]
    _refuse("from_keras", model.name, dropout, drops, states)
    start = {one.path: one.value for one in model.trainable_variables}
    fixed = [one.value for one in rest]

    def apply(params, inputs):
        own = [params[path] for path in start]
        return model.stateless_call(own, fixed, inputs, training=False)[0]

    return Model(lambda key: dict(start), apply)


def _layers(model: Any) -> Iterator[Any]:
    """The layers of a Keras model, and those of models in it."""
    for one in model.layers:
        yield one
        if hasattr(one, "layers"):
            yield from _layers(one)


def convert_module(
    library: str,
    make: Callable[[], Any],
    made: Any,
    shape: Shape,
    integers: bool,
    precision: str,
    switches: Mapping[str, Any],
) -> Model:
    """The model of the module that a function made; see ``fedblend.models.model_from``.

    Args:
        library: of the module, such as "flax".
        make: the function; for a PyTorch module it is called again for every key.
        made: what it returned.
        shape: of a row of inputs.
        integers: rows are numbers of classes or tokens.
        precision: of PyTorch's parameters.
        switches: options of the function that converts it.

    Raises:
        InputError: an option is not for that library, or the module is refused.
    """
    convert = CONVERTERS[library]
    for name in switches:
        if name not in inspect.signature(convert).parameters:
            raise InputError(f"{name}: is not for {describe(made)}")
    if library != "torch":
        return convert(made, **switches)

    def source():
        module = make()
        return module.double() if precision == "float64" else module

    refused = None
    for own in _layouts(shape):
        example = np.zeros((2, *own), np.int32 if integers else precision)
        try:
            return from_torch(source, example, **switches)
        except ExampleError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _layouts(shape: Shape) -> Iterator[Shape]:
    """Shapes of rows to try: PyTorch's of an image, the data's own, flat."""
    if len(shape) == 3:
        yield shape[-1], *shape[:-1]
    yield shape
    if len(shape) == 2:
        yield 1, *shape
    if len(shape) > 1:
        yield (int(np.prod(shape)),)


def _first_module(
    caller: str, source: Any, kind: type, draw: Callable[[Key], Any]
) -> Any:
    """The module that ``draw`` makes of a source with key 0, refused if it is none."""
    _refuse_torch(caller, source)
    needed = "a module, or a function that makes one"
    if not isinstance(source, kind) and not callable(source):
        raise UserError(f"{caller}: source", source, needed, describe(source))
    module = draw(jax.random.key(0))
    _refuse_torch(caller, module)
    if not isinstance(module[0] if isinstance(module, tuple) else module, kind):
        returned = f"a function that returns {describe(module)}"
        raise UserError(f"{caller}: source", source, needed, returned)
    return module


def _refuse_torch(caller: str, source: Any) -> None:
    """Refuse modules of PyTorch, and classes of them; another function takes them."""
    kind = source if isinstance(source, type) else type(source)
    if "torch.nn.modules.module" in {one.__module__ for one in kind.__mro__}:
        raise SettingError(
            f"{caller}: source",
            "is a module of PyTorch; fb.models.from_torch takes it",
        )


def _refuse(
    caller: str, name: str, dropout: Off, drops: list[str], states: list[str]
) -> None:
    """Refuse dropout that is not switched off, and state that is no parameter.

    Args:
        caller: the function that converts the module.
        name: of the module.
        dropout: what the user said about it.
        drops: where the module has dropout.
        states: what it has besides parameters, and where.
    """
    if drops:
        refuse_dropout(caller, name, dropout, f"at {drops[0]}")
    if states:
        raise InputError(
            f"{caller}: {name} has {states[0]}, as layers of batch statistics do; only "
            "parameters can be mixed and averaged; normalize within an example instead "
            "(LayerNorm, GroupNorm)"
        )


def _naming(
    tree: PyTree, holder: str = ""
) -> tuple[Callable[[PyTree], dict[str, jax.Array]], Callable[[dict], PyTree]]:
    """Functions from a tree of this structure to a dictionary by path, and back.

    ``holder`` is the suffix that a framework's wrapper of an array adds to the path.
    """
    structure = jax.tree.structure(tree)
    names = [path.removesuffix(holder) for path in leaves_by_path(tree)]

    def name(tree):
        return dict(zip(names, jax.tree.leaves(tree), strict=True))

    def restore(params):
        return jax.tree.unflatten(structure, [params[name] for name in names])

    return name, restore


CONVERTERS: dict[str, Callable[..., Model]] = {
    "torch": from_torch,
    "flax": from_flax,
    "equinox": from_equinox,
    "keras": from_keras,
}
"""The functions that convert modules, by library."""

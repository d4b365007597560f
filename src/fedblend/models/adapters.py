# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Models written with Flax NNX or Equinox, as a pair of functions.

Both frameworks are optional, and imported only when their adapter is called. The
parameters become a plain dictionary from a path ("layers/0/weight") to an array, which
everything that mixes, compresses or stores parameters can use.

Modules are in evaluation mode, in training too: dropout has no effect. Modules with
state besides parameters and random keys (the running means of batch normalization,
caches) are refused, since it would be neither trained nor shared. The module determines
the dtype of the parameters.
"""

from collections.abc import Callable
from typing import Any

import jax

from fedblend.core import PyTree
from fedblend.models.model import Model


def from_flax(source: Any) -> Model:
    """A model from a Flax NNX module.

    Args:
        source: a function from ``nnx.Rngs`` to a module, or a module, whose present
            parameters are then what ``init`` returns for every key.

    Example:
        >>> from flax import nnx
        >>> model = from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        >>> sorted(model.init(jax.random.key(0)))
        ['bias', 'kernel']
    """
    from flax import nnx

    def module_of(key):
        given = isinstance(source, nnx.Module)
        return nnx.clone(source) if given else source(nnx.Rngs(key))

    module = module_of(jax.random.key(0))
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


def from_equinox(source: Any) -> Model:
    """A model from an Equinox module, whose call takes one row.

    Args:
        source: a function from a key to a module, or a module, whose present
            parameters are then what ``init`` returns for every key. All floating
            arrays are parameters; everything else is that of the module made with key
            0.

    Example:
        >>> import equinox
        >>> model = from_equinox(lambda key: equinox.nn.Linear(4, 3, key=key))
        >>> sorted(model.init(jax.random.key(0)))
        ['bias', 'weight']
    """
    import equinox

    def module_of(key):
        return source if isinstance(source, equinox.Module) else source(key)

    module = equinox.nn.inference_mode(module_of(jax.random.key(0)))
    states = (equinox.nn.StateIndex, equinox.nn.State)
    nodes = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, states))
    if any(isinstance(node, states) for node in nodes):
        first = module[0] if isinstance(module, tuple) else module
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

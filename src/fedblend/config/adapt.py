# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The model of a configuration with adapters: its base is a file of safetensors.

The file is known by its sha256, which the configuration of a run, and so its folder and
its checkpoints, keep in place of the weights. Whatever makes the model again, to go on
with a run or to predict, finds that file or refuses.
"""

import dataclasses
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedblend.config.base_file import hash_file, read_arrays
from fedblend.config.schema.adapt import Adapt
from fedblend.core import PyTree
from fedblend.data.dataset import Task
from fedblend.errors import ConfigError, SettingError
from fedblend.models.adapt.adapt import adapt
from fedblend.models.adapt.kinds import KINDS
from fedblend.models.adapt.two_adapters import two_adapters
from fedblend.models.model import Model
from fedblend.simulation.io.serialize import named_leaves


def adapted(
    table: Adapt, model: Model, task: Task, precision: str, described: Any
) -> Model:
    """The model with adapters.

    A base is read, and kept, once for all that is built from one configuration.

    Args:
        table: ``[adapt]``.
        model: that of ``[model]``.
        task: what its rows are like.
        precision: of the run.
        described: what tells this model from others, as JSON takes it.

    Raises:
        ConfigError: the base is not that file, or not of this model.
    """
    stamp = None
    if table.base is not None:
        file = Path(table.base)
        stamp = [file.stat().st_mtime_ns, file.stat().st_size] if file.exists() else []
    facts = [table.model_dump(), described, task._asdict(), precision, stamp]
    text = json.dumps(facts, sort_keys=True, default=str)
    return _once(_Asked(text, lambda: _adapted(table, model, task, precision)))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A model that was asked for, by its description."""

    description: str
    make: Callable[[], Model] = dataclasses.field(compare=False)


@lru_cache(maxsize=2)
def _once(asked: _Asked) -> Model:
    return asked.make()


def _adapted(table: Adapt, model: Model, task: Task, precision: str) -> Model:
    whole = task.numbers or task.kind == "sequence"
    kind = jnp.int32 if whole else jnp.dtype(precision)
    rows = jax.ShapeDtypeStruct((2, *task.shape), kind)
    try:
        found = adapt(
            model,
            None if table.base is None else _base(table, model),
            how=KINDS[table.how](**table.options),
            inputs=rows,
            where=table.where,
            dtype=table.dtype,
        )
    except SettingError as error:
        key = error.key.removeprefix("adapt: ").replace(": ", ".")
        raise ConfigError(f"adapt.{key}: {error.why}") from None
    return two_adapters(found) if table.two else found


def _base(table: Adapt, model: Model) -> PyTree:
    """The parameters in the file, as those of the model."""
    path = Path(str(table.base))
    found = hash_file(path)
    if found != table.sha256:
        raise ConfigError(
            f"adapt.base: {path} has the sha256 {found}, and the base is {table.sha256}"
        )
    arrays = read_arrays(path)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves = []
    for (own, leaf), path_in_tree in zip(
        named_leaves(shapes).items(), _paths(shapes), strict=True
    ):
        name = path_in_tree if path_in_tree in arrays else own
        if name not in arrays:
            raise ConfigError(f"adapt.base: {path} has no weight {path_in_tree!r}")
        if arrays[name].shape != leaf.shape:
            raise ConfigError(
                f"adapt.base: {path}: {name} has the shape "
                f"{list(arrays[name].shape)}, the model's {list(leaf.shape)}"
            )
        leaves.append(jnp.asarray(arrays[name]).astype(leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _paths(tree: PyTree) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]

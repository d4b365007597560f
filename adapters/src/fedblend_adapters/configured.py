# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What a configuration with ``[adapt]`` has of this package: its model, its export."""

import dataclasses
import json
import mmap
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.config.tables.adapt import Adapt, hash_file
from fedblend.config.tables.model import model_of
from fedblend.core import PyTree
from fedblend.errors import ConfigError, RunError, SettingError
from fedblend.mixing import Blend, sum_of_changes
from fedblend.models.model import Model
from fedblend.runs.export.portable import Portable
from fedblend.simulation.serialize import (
    WireError,
    array_at,
    name_leaves,
    read_header,
)
from fedblend.trees import leaves_by_path, precision
from fedblend_adapters.adapt import adapt, two_adapters
from fedblend_adapters.kinds import KINDS, Lora, add_frozen, lora
from fedblend_adapters.peft import peft_files


def adapt_model(
    table: Adapt, model: Model, rows: jax.ShapeDtypeStruct, described: Any
) -> Model:
    """The model with adapters.

    A base is read, and kept, once for all that is built from one configuration.

    Args:
        table: ``[adapt]``.
        model: that of ``[model]``.
        rows: the shape of some inputs.
        described: what tells this model from others, as JSON takes it.

    Raises:
        ConfigError: the base is not that file, or not of this model.
    """
    stamp = None
    if table.base is not None:
        file = Path(table.base)
        stamp = [file.stat().st_mtime_ns, file.stat().st_size] if file.exists() else []
    facts = [table.model_dump(), described, str(rows), stamp]
    text = json.dumps(facts, sort_keys=True, default=str)
    return _once(_Asked(text, lambda: _adapt_model(table, model, rows)))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A model that was asked for, by its description."""

    description: str
    make: Callable[[], Model] = dataclasses.field(compare=False)


@lru_cache(maxsize=2)
def _once(asked: _Asked) -> Model:
    return asked.make()


def _adapt_model(table: Adapt, model: Model, rows: jax.ShapeDtypeStruct) -> Model:
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
        name_leaves(shapes).items(), leaves_by_path(shapes), strict=True
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


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, by name; they are read where they are used.

    Raises:
        ConfigError: it is no file of safetensors.
    """
    try:
        with path.open("rb") as file:
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header, _, body = read_header(memoryview(whole))
        return {name: array_at(body, entry) for name, entry in header.items()}
    except (WireError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"adapt.base: {path}: {error}") from None


def export_files(portable: Portable) -> dict[str, bytes]:
    """The adapter of a run as the files of ``peft``, by name.

    Raises:
        RunError: the run trained no adapter of low rank, or none of a PyTorch module.
    """
    table, name = portable.config.adapt, portable.config.model.name
    if table is None or table.how != "lora" or isinstance(portable.params, Blend):
        raise RunError('export: peft is for one adapter of [adapt] with how = "lora"')
    options: Any = table.options
    how, adapter = lora(**options), portable.params
    if table.two:
        adapter = sum_of_changes(adapter["shared"], adapter["personal"])
    if any("/" in path for path in adapter):
        raise RunError(
            f"export: peft has no names for the layers of {name}: it is for modules of "
            "PyTorch"
        )
    return peft_files(_whole(portable, adapter, how), how, base=table.base)


def _whole(portable: Portable, adapter: PyTree, how: Lora) -> PyTree:
    """The adapter with its A, where that is no parameter."""
    if how.train == "both":
        return adapter
    config, task = portable.config, portable.task
    with precision(config.run.precision):
        plain = config.model_copy(update={"adapt": None})
        model = model_of(plain, task)
        kind = "int32" if portable.takes_numbers else config.run.precision
        rows = jax.ShapeDtypeStruct((2, *task.shape), kind)
        return add_frozen(model, adapter, how=how, inputs=rows)

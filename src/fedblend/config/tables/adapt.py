# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[adapt]``: a frozen base, and the change of it that is trained.

The base is a file of safetensors, known by its sha256, which the configuration of a
run, and so its folder and its checkpoints, keep in place of the weights. Whatever makes
the model again, to continue a run or to predict, finds that file or refuses.
"""

import dataclasses
import hashlib
import json
import mmap
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import (
    Field,
    model_validator,
)

from fedblend.config import toml
from fedblend.config.table import (
    Content,
    Count,
    Index,
    Positive,
    Table,
    Word,
    matching,
    refuse_first,
)
from fedblend.core import PyTree
from fedblend.errors import ConfigError, SettingError
from fedblend.models.adapt.adapt import BaseDtype, adapt, two_adapters
from fedblend.models.adapt.kinds import KINDS
from fedblend.models.model import Model
from fedblend.registry import (
    ALGORITHMS,
)
from fedblend.simulation.serialize import (
    WireError,
    array_at,
    named_leaves,
    read_header,
)
from fedblend.trees import leaves_by_path

if TYPE_CHECKING:
    from fedblend.config.config import Config

_OF = {
    "rank": ("lora", "gated_lora"),
    "alpha": ("lora", "gated_lora"),
    "train": ("lora",),
    "seed": ("lora",),
    "length": ("prefix",),
}
"""The options of each kind of change."""
FORMS = {
    "factors": 'the factors of adapters: [adapt] with how = "lora"',
    "pairs": 'two adapters of a weight: [adapt] with how = "gated_lora" or two = true',
}
"""What algorithms ask of this table."""
Sha256 = Annotated[str, matching("[0-9a-f]{64}$", "64 digits of a sha256")]
ADAPTERS = {"factors": "lora", "pairs": "gated_lora"}
"""The kind of adapters, by what an algorithm asks of them."""


class Adapt(Table):
    """A frozen base, and the change of it that is trained."""

    how: Literal["lora", "gated_lora", "ia3", "bias", "full", "prefix"] = "lora"
    base: Word | None = None
    sha256: Sha256 | None = None
    where: Word | Annotated[list[Word], Field(min_length=1)] | None = None
    dtype: BaseDtype | None = None
    two: bool = False
    rank: Count | None = None
    alpha: Positive | None = None
    train: Literal["both", "b"] | None = None
    seed: Index | None = None
    length: Count | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> "Adapt":
        refuse_first(
            *(
                (
                    name in self.options and self.how not in kinds,
                    name,
                    f'goes with how = "{kinds[0]}", not with "{self.how}"',
                )
                for name, kinds in _OF.items()
            ),
            (
                self.how == "prefix" and self.where is not None,
                "where",
                'is not for how = "prefix"',
            ),
            (
                self.base is None and self.sha256 is not None,
                "sha256",
                "goes with base",
            ),
            (
                self.how == "gated_lora" and self.two,
                "two",
                'is not for how = "gated_lora", which has two',
            ),
        )
        return self

    @property
    def forms(self) -> list[str]:
        """What algorithms may ask for that this change has."""
        both = self.how == "lora" and self.train != "b"
        return ["factors"] * both + ["pairs"] * (self.two or self.how == "gated_lora")

    @property
    def options(self) -> dict[str, object]:
        """The options of the kind of change that are given."""
        return {name: of for name, of in self if name in _OF and of is not None}


def check(config: "Config") -> None:
    """Refuse adapters that the algorithm cannot train."""
    table, form = config.adapt, config.algorithm.entry.form
    if form in FORMS and (table is None or form not in table.forms):
        raise SettingError("adapt", f"{config.algorithm.name} is for {FORMS[form]}")


def usual_adapters(algorithm: Content) -> Content:
    """The table ``[adapt]`` of an algorithm that cannot do without."""
    entry = ALGORITHMS.get(str(algorithm.get("name")))
    how = ADAPTERS.get(str(entry and entry.form))
    return {} if how is None else {"how": how}


def add_hash(content: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the sha256 of its base, where it does not give one.

    Raises:
        ConfigError: there is no such file.
    """
    table = content.get("adapt")
    if not isinstance(table, dict) or table.get("sha256") is not None:
        return content
    base = table.get("base")
    if not isinstance(base, str):
        return content
    return {**content, "adapt": {**table, "sha256": hash_file(Path(base))}}


def require_base(config: Path) -> None:
    """Refuse the configuration of a run whose base is another file by now.

    A base that is not there is not missed: what was measured needs none.

    Raises:
        ConfigError: the file has another sha256.
    """
    table = toml.read(config).get("adapt") if config.is_file() else None
    if not isinstance(table, dict) or not isinstance(table.get("base"), str):
        return
    base = Path(table["base"])
    if base.is_file() and hash_file(base) != table.get("sha256"):
        raise ConfigError(
            f"{config}: adapt.base: {base} has changed since the run; its sha256 was "
            f"{table.get('sha256')}"
        )


def hash_file(path: Path) -> str:
    """The sha256 of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"adapt.base: {path}: {error.strerror or error}") from None


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
    return _once(_Asked(text, lambda: _with_adapters(table, model, rows)))


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A model that was asked for, by its description."""

    description: str
    make: Callable[[], Model] = dataclasses.field(compare=False)


@lru_cache(maxsize=2)
def _once(asked: _Asked) -> Model:
    return asked.make()


def _with_adapters(table: Adapt, model: Model, rows: jax.ShapeDtypeStruct) -> Model:
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
        named_leaves(shapes).items(), leaves_by_path(shapes), strict=True
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

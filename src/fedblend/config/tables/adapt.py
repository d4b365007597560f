# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[adapt]``: a frozen base, and the change of it that is trained.

The base is a file of safetensors, known by its sha256, which the configuration of a
run, and so its folder and its checkpoints, keep in place of the weights. Whatever makes
the model again, to continue a run or to predict, finds that file or refuses.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from fedblend.errors import ConfigError, SettingError
from fedblend.registry import (
    ALGORITHMS,
)

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
    dtype: Literal["float32", "float16", "bfloat16", "int8"] | None = None
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

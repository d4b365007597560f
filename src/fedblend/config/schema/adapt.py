# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[adapt]``: data only."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedblend.config.schema.table import Count, Index, Positive, Table, Word, matching
from fedblend.errors import SettingError
from fedblend.models.adapt.base import BaseDtype

_OF = {
    "rank": "lora",
    "alpha": "lora",
    "train": "lora",
    "seed": "lora",
    "length": "prefix",
}
"""The options of each kind of change."""

Sha256 = Annotated[str, matching("[0-9a-f]{64}$", "64 digits of a sha256")]


class Adapt(Table):
    """A frozen base, and the change of it that is trained."""

    how: Literal["lora", "ia3", "bias", "full", "prefix"] = "lora"
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
        for name, how in _OF.items():
            if getattr(self, name) is not None and self.how != how:
                wrong = f'goes with how = "{how}", not with "{self.how}"'
                raise SettingError(name, wrong)
        if self.how == "prefix" and self.where is not None:
            raise SettingError("where", 'is not for how = "prefix"')
        if self.base is None and self.sha256 is not None:
            raise SettingError("sha256", "goes with base")
        return self

    @property
    def options(self) -> dict[str, object]:
        """The options of the kind of change that are given."""
        return {
            name: getattr(self, name) for name in _OF if getattr(self, name) is not None
        }

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[adapt]``: data only."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedblend.config.schema.table import Count, Index, Positive, Table, Word, matching
from fedblend.errors import SettingError
from fedblend.models.adapt.base import BaseDtype

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
        for name, kinds in _OF.items():
            if getattr(self, name) is not None and self.how not in kinds:
                wrong = f'goes with how = "{kinds[0]}", not with "{self.how}"'
                raise SettingError(name, wrong)
        if self.how == "prefix" and self.where is not None:
            raise SettingError("where", 'is not for how = "prefix"')
        if self.base is None and self.sha256 is not None:
            raise SettingError("sha256", "goes with base")
        if self.how == "gated_lora" and self.two:
            raise SettingError("two", 'is not for how = "gated_lora", which has two')
        return self

    @property
    def forms(self) -> list[str]:
        """What algorithms may ask for that this change has."""
        both = self.how == "lora" and self.train != "b"
        return ["factors"] * both + ["pairs"] * (self.two or self.how == "gated_lora")

    @property
    def options(self) -> dict[str, object]:
        """The options of the kind of change that are given."""
        return {
            name: getattr(self, name) for name in _OF if getattr(self, name) is not None
        }


def require_form(table: Adapt | None, algorithm: Any) -> None:
    """Refuse adapters that an algorithm cannot train.

    Args:
        table: ``[adapt]``, if there is one.
        algorithm: the options of the algorithm.
    """
    form = algorithm.entry.form
    if form in FORMS and (table is None or form not in table.forms):
        raise SettingError("adapt", f"{algorithm.name} is for {FORMS[form]}")

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""``data.raw``: the columns of the raw tables that nodes have."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from fedblend.config.schema.table import Table, Word
from fedblend.errors import SettingError


class RawColumn(Table):
    """A column of the raw tables that nodes have, and the inputs made of it."""

    name: Word
    encoding: Literal[
        "standardize", "as_is", "flag", "one_hot", "ordinal", "date", "drop"
    ]
    style: str = ""
    categories: list[Word] = Field(default_factory=list)
    other: bool = False
    missing: bool = False
    parts: list[Literal["year", "week", "day"]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _goes_together(self) -> "RawColumn":
        named = self.encoding in ("one_hot", "ordinal")
        if named and len(self.categories) < 2:
            raise SettingError("categories", f"{self.name} needs 2 or more")
        if not named and (self.categories or self.other):
            key = "categories" if self.categories else "other"
            raise SettingError(key, 'goes with encoding = "one_hot" or "ordinal"')
        if self.encoding == "drop" and self.missing:
            raise SettingError("missing", "goes with a column that is not dropped")
        if self.parts and self.encoding != "date":
            raise SettingError("parts", 'goes with encoding = "date"')
        return self


def _different(columns: list[RawColumn]) -> list[RawColumn]:
    names = [column.name for column in columns]
    if len({*names}) < len(names):
        raise PydanticCustomError("range", "columns that differ in their names")
    return columns


RawColumns = Annotated[list[RawColumn], Field(min_length=1), AfterValidator(_different)]

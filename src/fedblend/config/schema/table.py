# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What all tables of a configuration have in common: nothing unknown, nothing coerced.

A text is not a number, ``true`` is not 1, and numbers are finite. The types below are
the ranges that recur.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """Something is wrong with a configuration: one line that says what and where."""


class RunError(ValueError):
    """Something is wrong with the folder of a run: one line."""


def visible(text: str) -> str:
    """The text on one line: what does not print is shown as an escape."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


class Table(BaseModel):
    """A table of a configuration."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


LARGEST = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=LARGEST)]
"""How many of something: 1 or more."""
Index = Annotated[int, Field(ge=0, le=LARGEST)]
"""A number from 0 on: a seed, a client."""
Word = Annotated[str, StringConstraints(min_length=1)]
"""A text that is not empty."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


def between(low: float, high: float, *, closed: bool) -> AfterValidator:
    """A check that a number lies in ``[low, high]``, or with ``closed`` off below."""

    def inside(value: float) -> float:
        if not low <= value <= high or (value == high and not closed):
            allowed = f"in [{low:g}, {high:g}{']' if closed else ')'}"
            raise PydanticCustomError("range", "{allowed}", {"allowed": allowed})
        return value

    return AfterValidator(inside)


Fraction = Annotated[float, between(0, 1, closed=False)]
"""At least 0 and below 1."""
Mixing = Annotated[float, between(0, 1, closed=True)]
"""A mixing weight: 0 and 1 are allowed."""

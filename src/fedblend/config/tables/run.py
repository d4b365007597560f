# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[run]``: how long, with whom, and how it is computed."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedblend.checks import Number
from fedblend.config.table import (
    Count,
    Fraction,
    Index,
    Positive,
    Table,
    within,
)
from fedblend.errors import SettingError
from fedblend.theory.bounds import require_resolved


class RunTable(Table):
    """How long, with whom, and how it is computed."""

    rounds: Index
    cohort: Count | None = None
    epoch: Count | None = None
    separation: Count | None = None
    sampling: Literal["fixed", "poisson"] = "fixed"
    seed: Index | Annotated[list[Index], Field(min_length=1)] = 0
    every: Count | None = None
    weights: Literal["by_count", "uniform"] | None = None
    chunk: Count | None = None
    devices: Count | None = None
    store: Literal["auto", "device", "host", "disk"] = "auto"
    rows: Literal["auto", "device", "host"] = "auto"
    dropout: Fraction = 0.0
    reduction: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim: Annotated[float, within(Number(least=0, below=0.5))] = 0.1
    precision: Literal["float32", "float64"] = "float32"
    keep_personal: Literal["auto", "always", "never"] = "auto"
    until: Positive | None = None

    @model_validator(mode="after")
    def _resolved(self) -> "RunTable":
        if self.until is not None:
            require_resolved("until", self.until, self.precision)
        return self

    @model_validator(mode="after")
    def _different_seeds(self) -> "RunTable":
        if isinstance(self.seed, list) and len(set(self.seed)) < len(self.seed):
            raise SettingError("seed", f"{self.seed} has the same seed twice")
        return self

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables ``[run]`` and ``[populations.NAME]``: how long, with whom, on what."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from fedblend.checks import Number
from fedblend.config.table import (
    Count,
    Fraction,
    Index,
    Positive,
    Share,
    Table,
    Word,
    limit,
)
from fedblend.data.dataset import DataError
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError, SettingError
from fedblend.simulation.sampling import Strata
from fedblend.theory.bounds import require_resolved


class Population(Table):
    """Which clients belong to it, by their names, and what they weigh together."""

    clients: Word | Annotated[list[Word], Field(min_length=1)]
    weight: Share
    cohort: Count | None = None


Populations = Annotated[dict[Word, Population], Field(min_length=1)]


def strata(
    populations: Mapping[str, Population] | None, federated_data: FederatedData
) -> Strata | None:
    """What ``simulate`` takes for them.

    Raises:
        DataError: clients do not fall into these populations.
    """
    if populations is None:
        return None
    names = [federated_data.name(client) for client in range(federated_data.clients)]
    inside = np.array([_members(table, names) for table in populations.values()])
    for name, mine in zip(populations, inside, strict=True):
        if not mine.any():
            raise DataError(
                f"populations.{name}.clients: match none of the {len(names)} clients, "
                f"whose names are {names[0]!r} and so on"
            )
    for client, count in enumerate(inside.sum(axis=0)):
        if count != 1:
            own = zip(populations, inside[:, client], strict=True)
            there = " and in ".join(name for name, mine in own if mine)
            raise DataError(
                f"populations: client {names[client]!r} is in "
                f"{there or 'none of ' + ', '.join(populations)}"
            )
    sizes = []
    for (name, table), mine in zip(populations.items(), inside, strict=True):
        sizes.append(int(mine.sum()) if table.cohort is None else table.cohort)
        if sizes[-1] > mine.sum():
            raise ConfigError(
                f"populations.{name}.cohort: {sizes[-1]} is more than its "
                f"{mine.sum()} clients"
            )
    weights = [table.weight for table in populations.values()]
    return Strata(inside.argmax(axis=0), weights, sizes)


def _members(table: Population, names: list[str]) -> list[bool]:
    patterns = [table.clients] if isinstance(table.clients, str) else table.clients
    return [any(fnmatchcase(name, one) for one in patterns) for name in names]


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
    trim: Annotated[float, limit(Number(least=0, below=0.5))] = 0.1
    precision: Literal["float32", "float64"] = "float32"
    keep_personal: Literal["auto", "always", "never"] = "auto"
    until: Positive | None = None

    @model_validator(mode="after")
    def _check_until(self) -> "RunTable":
        if self.until is not None:
            require_resolved("until", self.until, self.precision)
        return self

    @model_validator(mode="after")
    def _different_seeds(self) -> "RunTable":
        if isinstance(self.seed, list) and len(set(self.seed)) < len(self.seed):
            raise SettingError("seed", f"{self.seed} has the same seed twice")
        return self

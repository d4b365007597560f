# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables ``[populations.NAME]``: clients that are drawn together."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

import numpy as np
from pydantic import (
    Field,
)

from fedblend.config.table import (
    Count,
    Share,
    Table,
    Word,
)
from fedblend.data.dataset import DataError
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError
from fedblend.simulation.sampling import Strata


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

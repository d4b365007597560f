# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables ``[populations.NAME]``: clients that are drawn and weighed together."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

import numpy as np
from pydantic import Field

from fedblend.config.schema.table import ConfigError, Count, Misfit, Share, Table
from fedblend.config.schema.tables import Word
from fedblend.data.dataset import DataError
from fedblend.data.federated import FederatedData
from fedblend.simulation.sampling import Strata


class Population(Table):
    """Which clients belong to it, by their names, and what they weigh together."""

    clients: Word | Annotated[list[Word], Field(min_length=1)]
    weight: Share
    cohort: Count | None = None


Populations = Annotated[dict[Word, Population], Field(min_length=1)]


def check(tables: Mapping[str, Population], cohort: int | None) -> None:
    """Refuse tables that do not go together."""
    total = sum(table.weight for table in tables.values())
    if abs(total - 1) > 1e-6:
        raise Misfit("populations", f"the weights sum to {total:g}, not to 1")
    if cohort is not None:
        wrong = f"{cohort} goes without populations, each has a cohort"
        raise Misfit("run.cohort", wrong)


def strata(
    tables: Mapping[str, Population] | None, federated_data: FederatedData
) -> Strata | None:
    """What ``simulate`` takes for them.

    Raises:
        DataError: clients do not fall into these populations.
    """
    if tables is None:
        return None
    names = [federated_data.name(client) for client in range(federated_data.clients)]
    inside = np.array([_members(table, names) for table in tables.values()])
    for name, mine in zip(tables, inside, strict=True):
        if not mine.any():
            raise DataError(
                f"populations.{name}.clients: match none of the {len(names)} clients, "
                f"whose names are {names[0]!r} and so on"
            )
    for client, count in enumerate(inside.sum(axis=0)):
        if count != 1:
            there = [
                name for name, mine in zip(tables, inside, strict=True) if mine[client]
            ]
            raise DataError(
                f"populations: client {names[client]!r} is in "
                f"{' and in '.join(there) or 'none of ' + ', '.join(tables)}"
            )
    sizes = []
    for (name, table), mine in zip(tables.items(), inside, strict=True):
        sizes.append(int(mine.sum()) if table.cohort is None else table.cohort)
        if sizes[-1] > mine.sum():
            raise ConfigError(
                f"populations.{name}.cohort: {sizes[-1]} is more than its "
                f"{mine.sum()} clients"
            )
    weights = [table.weight for table in tables.values()]
    return Strata(inside.argmax(axis=0), weights, sizes)


def _members(table: Population, names: list[str]) -> list[bool]:
    patterns = [table.clients] if isinstance(table.clients, str) else table.clients
    return [any(fnmatchcase(name, one) for one in patterns) for name in names]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[select]``: messages that hold the rows of tables that a client uses."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import (
    Field,
)

from fedblend import transforms
from fedblend.config.table import Table, refuse_first
from fedblend.core import Algorithm, PyTree
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError
from fedblend.models.dual_encoder import PAD
from fedblend.transforms.fedselect import Use, count_rows, select_within
from fedblend.trees import leaves_by_path

if TYPE_CHECKING:
    from fedblend.config.config import Config

LOOKED_UP = {"dual_encoder": {"embedding": ("0", "1")}}
"""By model: the tables it looks rows up in, and which inputs have the numbers."""
ALWAYS = {"dual_encoder": PAD + 1}
"""By model: rows from the first on that every client receives."""


class Select(Table):
    """Which parameters are tables."""

    parameters: Annotated[list[str], Field(min_length=1)]


def check(config: "Config") -> None:
    """Refuse tables that the model does not look rows up in, or that are read whole."""
    if config.select is None:
        return
    name, model = config.model.name, config.model
    found, known = LOOKED_UP.get(name, {}), ", ".join(LOOKED_UP)
    decay = getattr(config.algorithm.optimizer, "weight_decay", 0)
    refuse_first(
        *(
            (
                found and one not in found,
                "select.parameters",
                f'"{one}" is no table that {name} looks rows up in; there is '
                f"{', '.join(found)}",
            )
            for one in config.select.parameters
        ),
        (not found, "select", f"{name} looks no rows up in a table; {known} does"),
        (
            model.loss not in (None, "hinge"),
            "select",
            f'model.loss = "{model.loss}" reads the whole table',
        ),
        (model.l2, "select", f"model.l2 = {model.l2} reads the whole table"),
        (config.compress, "select", "does not go with [compress]"),
        (
            config.privacy,
            "select",
            "reveals to the server which rows are whose; no [privacy]",
        ),
        (decay, "select", f"weight_decay = {decay} moves rows that nobody uses"),
    )


def select_rows(
    config: "Config", algorithm: Algorithm, federations: Sequence[FederatedData]
) -> Algorithm:
    """The algorithm, with messages that hold the rows that a client uses.

    Raises:
        ConfigError: it is none that can do without the other rows, or there are several
            splits.
    """
    rows, always = tables(config)
    if not rows:
        return algorithm
    if len(federations) > 1:
        raise ConfigError(
            "data.split_seed: is missing; [select] knows which rows are used in one "
            "split, so that several run.seed need the same: data.split_seed=0"
        )
    try:
        return transforms.fedselect(algorithm, federations[0], rows=rows, always=always)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def tables(config: "Config") -> tuple[dict[str, tuple[str, ...]], int]:
    """Tables with the fields that name their rows; rows that everybody gets."""
    if config.select is None:
        return {}, 0
    fields = LOOKED_UP[config.model.name]
    rows = {name: fields[name] for name in config.select.parameters}
    return rows, ALWAYS[config.model.name]


def rooms(
    config: "Config", federated_data: FederatedData, params: PyTree
) -> dict[str, int]:
    """A bound on how many rows of each table any client uses.

    It is a power of two, or all rows: how many they are exactly stays with the client.

    Args:
        config: names the tables.
        federated_data: the clients.
        params: shapes of the parameters.
    """
    chosen, always = tables(config)
    sizes = table_sizes(config, params)
    found = {}
    for name, fields in chosen.items():
        most = int(count_rows(federated_data, fields, always).counts.max())
        found[name] = min(1 << (most - 1).bit_length(), sizes[name])
    return found


def table_sizes(config: "Config", params: PyTree) -> dict[str, int]:
    """How many rows each table has."""
    leaves = leaves_by_path(params)
    return {name: int(leaves[name].shape[0]) for name in tables(config)[0]}


def select_rows_within(
    config: "Config", algorithm: Algorithm, params: PyTree, room: Mapping[str, int]
) -> Algorithm:
    """The algorithm for clients whose examples nobody else has; ``room`` as ``rooms``.

    Raises:
        ConfigError: it is none that can do without the other rows.
    """
    rows, always = tables(config)
    if not rows:
        return algorithm
    sizes = table_sizes(config, params)
    most = {name: Use(np.array([room[name]]), sizes[name] - 1) for name in rows}
    try:
        return select_within(algorithm, most, rows=rows, always=always)
    except ValueError as error:
        raise ConfigError(str(error)) from None

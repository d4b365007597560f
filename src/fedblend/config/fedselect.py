# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[select]``: tables of which clients get the rows that they use.

Which rows an example uses is known of the models that look rows up.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from fedblend import transforms
from fedblend.config.schema.table import ConfigError, Misfit, Table
from fedblend.core import Algorithm, PyTree
from fedblend.data.federated import FederatedData
from fedblend.models.dual_encoder import PAD
from fedblend.transforms.fedselect import select_within
from fedblend.transforms.sparse_rows import Use, named, used_rows

if TYPE_CHECKING:
    from fedblend.config.config import Config

LOOKED_UP = {"dual_encoder": {"embedding": ("0", "1")}}
"""For models, the tables they look rows up in, and where examples have the numbers."""
ALWAYS = {"dual_encoder": PAD + 1}
"""Rows from the first on that keep their numbers."""


class Select(Table):
    """Which parameters are tables."""

    parameters: Annotated[list[str], Field(min_length=1)]


def check_tables(config: "Config") -> None:
    """Refuse what does not go with a model that looks rows up, or needs one.

    Raises:
        ValueError: one line, with the key first.
    """
    model = config.model.name
    if model == "dual_encoder" and not _has_numbers(config):
        raise Misfit(
            "model.name",
            '"dual_encoder" reads numbers of movies, as data.source = "movielens" has '
            'them, or nodes with data.kind = "classes"',
        )
    central = config.central
    if central is not None and central.penalty and model != "dual_encoder":
        raise Misfit(
            "central.penalty",
            f'"{central.penalty}" is of the embeddings of dual_encoder, and the model '
            f"is {model}",
        )
    if config.select is not None:
        _check(config, config.select, model)


def _check(config: "Config", table: Select, model: str) -> None:
    if model not in LOOKED_UP:
        known = ", ".join(LOOKED_UP)
        raise Misfit("select", f"{model} looks no rows up in a table; {known} does")
    for name in table.parameters:
        if name not in LOOKED_UP[model]:
            raise Misfit(
                "select.parameters",
                f'"{name}" is no table that {model} looks rows up in; there is '
                f"{', '.join(LOOKED_UP[model])}",
            )
    if config.model.loss not in (None, "hinge"):
        loss = config.model.loss
        raise Misfit("select", f'model.loss = "{loss}" reads the whole table')
    if config.model.l2:
        raise Misfit("select", f"model.l2 = {config.model.l2} reads the whole table")
    if config.compress is not None:
        raise Misfit("select", "does not go with [compress]")
    if config.privacy is not None:
        raise Misfit("select", "tells the server which rows are whose; no [privacy]")
    decay = getattr(getattr(config.algorithm, "optimizer", None), "weight_decay", 0)
    if decay:
        raise Misfit("select", f"weight_decay = {decay} moves rows that nobody uses")


def selected(
    config: "Config", algorithm: Algorithm, federated_data: FederatedData
) -> Algorithm:
    """The algorithm, with messages that hold the rows that a client uses.

    Raises:
        ConfigError: it is none that can do without the other rows.
    """
    rows, always = tables(config)
    if not rows:
        return algorithm
    try:
        return transforms.fedselect(algorithm, federated_data, rows=rows, always=always)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def tables(config: "Config") -> tuple[dict[str, tuple[str, ...]], int]:
    """Tables with the fields that name their rows; rows that everybody gets."""
    if config.select is None:
        return {}, 0
    fields = LOOKED_UP[config.model.name]
    rows = {name: fields[name] for name in config.select.parameters}
    return rows, ALWAYS[config.model.name]


def reads_numbers(config: "Config") -> bool:
    """Whether the model looks up rows of a table by the inputs."""
    return config.model.name in LOOKED_UP


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
        most = int(used_rows(federated_data, fields, always).counts.max())
        found[name] = min(1 << (most - 1).bit_length(), sizes[name])
    return found


def table_sizes(config: "Config", params: PyTree) -> dict[str, int]:
    """How many rows each table has."""
    leaves = named(params)
    return {name: int(leaves[name].shape[0]) for name in tables(config)[0]}


def selected_within(
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


def _has_numbers(config: "Config") -> bool:
    data = config.data
    on_nodes = data.partition == "nodes" and data.kind == "classes"
    return on_nodes or data.source == "movielens"

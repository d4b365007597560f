# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of attackers, by the table ``[attack]``; ``transforms`` has their updates."""

from collections.abc import Sequence

from fedblend.config.schema.attack import Attack
from fedblend.data.federated import FederatedData
from fedblend.data.poison import flip_labels
from fedblend.errors import ConfigError, UserError


def poisoned(
    table: Attack | None, federations: Sequence[FederatedData]
) -> Sequence[FederatedData]:
    """The clients' rows, with labels of attackers flipped where ``[attack]`` says so.

    Raises:
        ConfigError: an attacker is no client, or rows have no labels to flip.
    """
    if table is None or table.how != "flip_labels":
        return federations
    who = table.attackers(federations[0].clients)
    try:
        return [flip_labels(one, attackers=who) for one in federations]
    except UserError as error:
        raise ConfigError(f"attack.how: {str(error).partition(': ')[2]}") from None

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[attack]``: clients of a simulation that do not follow the protocol."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    Field,
    model_validator,
)

from fedblend.config.table import (
    Index,
    Positive,
    Table,
)
from fedblend.data import variants
from fedblend.data.federated import (
    FederatedData,
)
from fedblend.errors import ConfigError, SettingError, UserError


class Attack(Table):
    """Which clients of a simulation lie, and how."""

    how: Literal["negate", "scale", "noise", "inner_product", "flip_labels"]
    clients: Annotated[list[Index], Field(min_length=1)]
    factor: Positive | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> "Attack":
        if self.how == "flip_labels" and self.factor is not None:
            raise SettingError("factor", 'is for updates, not for how = "flip_labels"')
        return self

    def attackers(self, clients: int) -> np.ndarray:
        """Which of so many clients attack.

        Raises:
            ConfigError: one of them is no client.
        """
        for client in self.clients:
            if client >= clients:
                wrong = f"{client} is no client; there are {clients}, from 0 on"
                raise ConfigError(f"attack.clients: {wrong}")
        return np.isin(np.arange(clients), self.clients)


def flip_labels(
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
        return [variants.flip_labels(one, attackers=who) for one in federations]
    except UserError as error:
        raise ConfigError(f"attack.how: {str(error).partition(': ')[2]}") from None

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[attack]``: clients of a simulation that do not follow the protocol."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from fedblend.config.schema.table import Index, Positive, Table
from fedblend.errors import ConfigError, SettingError


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

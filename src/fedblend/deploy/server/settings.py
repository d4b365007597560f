# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How a federation is led, and what a server is set up with."""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from fedblend.core import Key
from fedblend.data.federated import FederatedData
from fedblend.deploy.transport import Patience
from fedblend.metrics import Metric
from fedblend.simulation.communication import Totals
from fedblend.simulation.engine import Engine


class BelowQuorum(RuntimeError):
    """Too few clients were heard; the books are as they were before the step."""


class RoundRules(NamedTuple):
    """How a federation is led."""

    rounds: int
    cohort: int
    every: int = 1
    """Rounds between two measurements."""
    quorum: float = 1.0
    """Part of the cohort without which a round is not counted."""
    spare: int = 0
    """Members asked beyond the cohort; the first to answer are heard."""
    longest: float | None = None
    """Norm of a client's change beyond which it is rejected."""
    longest_rest: float | None = None
    """Norm of all else that a client says, beyond which it is rejected."""
    largest: int | None = None
    """Bytes of an answer that are read at all."""
    patience: Patience = Patience()

    @property
    def least(self) -> int:
        """Clients that have to be heard in a round."""
        # 0.55 of 20 are 11, and not 11.000000000000002.
        return max(ceil(round(self.quorum * self.cohort, 9)), 1)


class Setting(NamedTuple):
    """What a server is set up with."""

    engine: Engine
    """With shapes in place of the clients' rows."""
    federated_data: FederatedData
    """The clients' numbers of rows, and no rows."""
    weights: np.ndarray
    experiment: str
    terms: Mapping[str, Any]
    """What nodes are told when they are enrolled."""
    server_key: Key
    """Of the server's own draws; clients need not know it."""
    note: Callable[..., Any]
    metrics: Mapping[str, Metric]
    """What clients measure, by name."""
    alone: dict[str, Any] | None = None
    """How long clients train alone, to compare with."""


class News(NamedTuple):
    """What happened since the last record."""

    rounds: int = 0
    seconds: float = 0.0
    received: int = 0
    dropped: int = 0
    rejected: int = 0

    def plus(self, seconds: float, totals: Totals) -> "News":
        """With one round more."""
        return News(
            self.rounds + 1,
            self.seconds + seconds,
            self.received + totals.received,
            self.dropped + totals.dropped,
            self.rejected + totals.rejected,
        )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the operator of a node permits, and the refusal of what is not permitted."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedblend_federation.client.executor import Executor, Measured
from fedblend_federation.client.ledger import Allowance
from fedblend_federation.client.policy import Limits


class Refusal(ValueError):
    """A node does not do what a message asks, and why: one line.

    Args:
        reason: what the server gets to know.
        detail: what the node's own audit gets to know, if that is more.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail or reason


class Permissions(NamedTuple):
    """What the operator of a node permits, for one message."""

    describe: Callable[[Mapping[str, Any]], dict[str, Any]]
    """From the fields of a message to the node's description, or a ``Refusal``."""
    executor: Callable[[Mapping[str, Any]], Executor]
    """From the terms of an experiment to what computes it, or a ``Refusal``."""
    disclosed: Callable[[Measured, dict[str, int]], Measured]
    """Those of the measures that may leave the node; also given the rows of a split."""
    max_bytes: int | None = None
    """Of a message; a longer one is not read."""
    allowance: Allowance = Allowance()
    """What may leave the node over all experiments."""
    limits: Limits | None = None
    """On disk, experiments and counts in messages; None for none."""
    metric_noise: float = 0.0
    """On measures, in units of how far one row can move them."""
    secure: Callable[[Mapping[str, Any]], Any] = lambda terms: None
    """From the terms of an experiment to what its secure sums need, see
    ``secure.answers``; None for an experiment without them."""
    rows_may_change: bool = False
    """Whether an experiment may go on with other rows than it began with."""

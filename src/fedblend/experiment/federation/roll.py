# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who has come to a federation, and how many rows each has."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedblend.experiment.config import Config
from fedblend.experiment.federation.agreement import (
    SPLITS,
    nodes_of,
    row_of,
    task_of,
)
from fedblend.runtime.flower.directory import Directory
from fedblend.runtime.flower.letters import fingerprint
from fedblend.runtime.flower.post import Patience
from fedblend.runtime.flower.ruling import BelowQuorum

Counts = dict[str, np.ndarray]
"""Every client's rows in each split."""


class Roll:
    """Takes what nodes say of themselves; ``known`` is what they once said."""

    def __init__(self, config: Config, clients: int, known: Mapping | None):
        self.config, self.clients = config, clients
        self.row = fingerprint(row_of(task_of(nodes_of(config))))
        self.counts: dict[int, dict[str, int]] = {}
        self.settled = known is not None
        if known is not None:
            self.counts = {
                client: {name: int(held[client]) for name, held in known.items()}
                for client in range(clients)
            }

    def accept(self, client: int, words: Mapping[str, Any]) -> str | None:
        """Why a node that says this of itself is not taken."""
        if not 0 <= client < self.clients:
            return f"client {client} is not one of the {self.clients} of data.clients"
        said, data = words.get("counts"), nodes_of(self.config)
        wanted = {"train": True, "validation": data.validation, "test": data.test}
        names = {name for name, needed in wanted.items() if needed}
        if (
            not isinstance(said, dict)
            or set(said) != names
            or not all(isinstance(n, int) and 0 <= n < 2**31 for n in said.values())
            or said["train"] < 1
        ):
            return f"client {client} says no usable numbers of rows"
        if words.get("row") != self.row:
            return f"client {client} has rows of another shape"
        if self.settled and said != self.counts[client]:
            return (
                f"client {client} has {said} rows now, and began with "
                f"{self.counts[client]}"
            )
        self.counts[client] = dict(said)
        return None

    def complete(self, directory: Directory, patience: Patience) -> Counts:
        """The rows of all clients; waits until every one has been met."""
        begun = time.monotonic()
        while len(self.counts) < self.clients:
            directory.where()
            directory.receive()
            lacking = sorted(set(range(self.clients)) - set(self.counts))
            if lacking and time.monotonic() - begun > patience.deadline:
                away = "; ".join(sorted(set(directory.turned_away.values())))
                raise BelowQuorum(
                    f"clients {lacking} did not come"
                    + (f", others were turned away: {away}" if away else "")
                )
            if lacking:
                time.sleep(patience.poll)
        ordered = [self.counts[client] for client in range(self.clients)]
        return {
            name: np.array([said[name] for said in ordered], np.int64)
            for name in SPLITS
            if name in ordered[0]
        }

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Measuring the models of a run on its clients, on all of them or a fixed sample."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.core import PyTree
from fedblend.data.federated import Shards
from fedblend.metrics import Metric
from fedblend.simulation.engine import Engine
from fedblend.simulation.result import Measured
from fedblend.simulation.rounds import Members

MEASURE_BYTES = 2**28
"""Memory that the rows of clients measured side by side may take."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What to measure, on whom.

    ``local`` is a run of ``local_only``, whose personal models are every client's
    alternative to taking part.
    """

    engine: Engine
    metrics: Mapping[str, Metric]
    splits: Mapping[str, Shards]
    ids: np.ndarray
    replicas: int | None
    local: Any = None

    @property
    def counts(self) -> dict[str, np.ndarray]:
        """The measured clients' rows in each split."""
        return {name: split.counts[self.ids] for name, split in self.splits.items()}

    @cached_property
    def chunk(self) -> int:
        """Clients measured side by side: as in training, if their rows fit."""
        window = max(
            split.capacity * leaf[:1].nbytes
            for split in self.splits.values()
            for leaf in jax.tree.leaves(split.examples)
        )
        most = max(MEASURE_BYTES // (window * (self.replicas or 1)), 1)
        return int(min(most, self.engine.settings.chunk, len(self.ids)))

    @property
    def padded_ids(self) -> np.ndarray:
        """The measured clients, some of them again to fill the last chunk."""
        return np.resize(self.ids, len(self.ids) + -len(self.ids) % self.chunk)

    def look(
        self, down: PyTree, states: PyTree, members: Members
    ) -> tuple[list[Measured], list[Measured]]:
        """The measures of each replica, and those of training alone if they are known.

        Also what each row brings to them, arrays [clients, rows].

        States and members are those of ``padded_ids``.
        """
        padded = self.padded_ids
        rows = {
            name: (
                jnp.asarray(split.starts[..., padded], jnp.int32),
                jnp.asarray(split.counts[padded], jnp.int32),
            )
            for name, split in self.splits.items()
        }
        values = self.engine.measure(
            self.metrics,
            {name: split.capacity for name, split in self.splits.items()},
            self.chunk,
            down,
            states,
            members,
            rows,
        )
        values = jax.device_get(values)
        if self.replicas is None:
            values = jax.tree.map(lambda leaf: leaf[None], values)
        found, brought = (
            [
                jax.tree.map(
                    lambda leaf, replica=replica: leaf[replica, : len(self.ids)], of
                )
                for replica in range(self.replicas or 1)
            ]
            for of in values
        )
        if self.local is not None:
            alone = self.local.complete()
            for replicas, theirs in ((found, alone.measured), (brought, alone.brought)):
                for replica, measured in enumerate(replicas):
                    reference = theirs[replica if len(theirs) > 1 else 0]
                    for split, models in measured.items():
                        models["local"] = reference[split]["personal"]
        return found, brought

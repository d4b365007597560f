# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A completed run of many replicas, seen as the run of some of them.

A sweep runs all its values as replicas of one simulation; the replicas of one value are
what a run of that value alone would be.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from fedblend import trees
from fedblend.core import Info, PyTree
from fedblend.gains import Measured
from fedblend.simulation.result import Measures, Models, Record, spreads
from fedblend.simulation.run import Run


class RunOfReplicas(Run):
    """Some replicas of a completed run, compared with training alone.

    Args:
        whole: the run of all replicas, which was not compared with training alone.
        places: of the replicas; a number makes a run without replicas.
        local: training alone, with as many replicas; None for no comparison.
        over: the swept values, as they are in a run of these replicas alone.
    """

    def __init__(
        self,
        whole: Run,
        places: slice | int,
        local: Run | None = None,
        over: PyTree | None = None,
    ):
        self._whole, self._places, self._local = whole, places, local
        self._engine, self._clients = whole._engine, whole._clients
        self._evaluation = whole._evaluation
        self.settings, self.key, self.over = whole.settings, whole.key, over
        if self.key.ndim:
            self.key = self.key[places]
        self.params, self.shapes = whole.params, whole.shapes
        if self._engine.inits == 0:
            self.params = trees.take(self.params, places)
        self.federated_data, self.cohorts = whole.federated_data, whole.cohorts
        self.cohort, self.budget = whole.cohort, whole.budget
        self.rounds, self.every, self.round = whole.rounds, whole.every, whole.round
        self.earlier_seconds = whole.earlier_seconds
        chosen = range(whole.replicas or 1)[places]
        several = isinstance(chosen, range)
        self.replicas = len(chosen) if several else None
        self._numbers = list(chosen) if several else [chosen]
        self._logs = [whole._logs[number] for number in self._numbers]
        self.down, self.server = trees.take((whole.down, whole.server), places)
        found = [
            [of[number] for number in self._numbers if of]
            for of in (whole.measured, whole.by_row)
        ]
        self.measured, self.by_row = map(self._with_local, found, (0, 1))
        self.records = [self._record_of(record) for record in whole.records]

    @property
    def compile_seconds(self) -> float:
        """The replicas' share of the seconds that compiling took."""
        return self._share * self._whole.compile_seconds

    @property
    def _share(self) -> float:
        return len(self._numbers) / (self._whole.replicas or 1)

    def personal(self, client: int) -> PyTree:
        """The model that a client would deploy: parameters, or a ``Blend``."""
        return trees.take(self._whole.personal(client), self._places)

    def client_states(self, ids: Sequence[int] | np.ndarray | None = None) -> PyTree:
        """The states of these clients, as in ``Run``."""
        return self._of(self._whole.client_states(ids))

    def info(self, ids: Sequence[int] | np.ndarray | None = None) -> Info:
        """The diagnostics of these clients, as in ``Run``."""
        return self._of(self._whole.info(ids))

    def _of(self, by_client: PyTree) -> PyTree:
        """The replicas' part of arrays ``[clients, replicas, ...]``."""
        return jax.tree.map(lambda leaf: leaf[:, self._places], by_client)

    def _with_local(self, replicas: list[Measured], by_row: int) -> list[Measured]:
        """What was measured, with training alone as one of the models."""
        if self._local is None:
            return replicas
        evidence = self._local.complete().evidence
        theirs = (evidence.measured, evidence.by_row)[by_row]
        return [
            {
                split: {
                    **models,
                    "local": theirs[place % len(theirs)][split]["personal"],
                }
                for split, models in measured.items()
            }
            for place, measured in enumerate(replicas)
        ]

    def _record_of(self, record: list[Record]) -> Record | list[Record]:
        chosen = [
            dataclasses.replace(
                record[number],
                seconds=record[number].seconds * self._share,
                measures=self._measures(record[number].measures, place),
            )
            for place, number in enumerate(self._numbers)
        ]
        return chosen[0] if self.replicas is None else chosen

    def _measures(self, measures: Measures, place: int) -> Measures:
        """The measures of a record, with those of training alone."""
        if self._local is None:
            return measures
        asked = self._evaluation
        own = {
            split: {"local": models["local"]}
            for split, models in self.measured[place].items()
        }
        alone = spreads(own, asked.counts, asked.metrics)
        return Measures(
            (split, Models({**models, **alone[split]}))
            for split, models in measures.items()
        )

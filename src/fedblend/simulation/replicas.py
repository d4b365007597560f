# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A completed run of many replicas, seen as the run of some of them.

A sweep runs all its values as replicas of one simulation; the replicas of one value are
what a run of that value alone would be.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from fedblend import trees
from fedblend.core import PyTree, Shard
from fedblend.simulation.cohort_loader import Clients, Places
from fedblend.simulation.engine import Engine
from fedblend.simulation.result import Measures, Models, Record, spreads
from fedblend.simulation.rounds import Members
from fedblend.simulation.run import Run
from fedblend.stats.gains import Measured


class RunOfReplicas(Run):
    """Some replicas of a completed run, compared with training alone.

    Args:
        whole: the run of all replicas, which was not compared with training alone.
        places: of the replicas; a number makes a run without replicas.
        local: training alone, with as many replicas; None for no comparison.
    """

    def __init__(self, whole: Run, places: slice | int, local: Run | None = None):
        self._whole, self._local = whole, local
        self._engine = engine = engine_of(whole._engine, places)
        self._clients: Any = ClientsOfReplicas(whole._clients, places)
        self._evaluation = whole._evaluation
        self.settings, self.key, self.over = engine.settings, engine.key, engine.over
        self._pipeline, self.shapes = whole._pipeline, whole.shapes
        self.federated_data, self.replicas = whole.federated_data, engine.replicas
        self.cohorts, self.cohort = whole.cohorts, whole.cohort
        self.rounds, self.every, self.round = whole.rounds, whole.every, whole.round
        self.budget, self.earlier_seconds = whole.budget, whole.earlier_seconds
        self.down, self.server = trees.take((whole.down, whole.server), places)
        chosen = range(whole.replicas or 1)[places]
        numbers = [chosen] if isinstance(chosen, int) else list(chosen)
        self._share = len(numbers) / (whole.replicas or 1)
        self.measure_seconds = self._share * whole.measure_seconds
        self._logs = [whole._logs[number] for number in numbers]
        found = [
            [of[number] for number in numbers if of]
            for of in (whole.measured, whole.by_row)
        ]
        self.measured, self._found_rows = map(self._with_local, found, (0, 1))
        self.records = [
            self._record_of([record[number] for number in numbers])
            for record in whole.records
        ]

    @property
    def by_row(self) -> list[Measured]:
        """What single rows contribute, in each replica."""
        return self._found_rows

    @property
    def compile_seconds(self) -> float:
        """The replicas' share of the seconds that compiling took."""
        return self._share * self._whole.compile_seconds

    def _with_local(self, replicas: list[Measured], by_row: int) -> list[Measured]:
        """What was measured, with training alone as one of the models."""
        if self._local is None:
            return replicas
        evidence = self._local.complete().evidence
        theirs = (evidence.measured, evidence.by_row)[by_row]
        return [
            {
                split: {**models, "local": theirs[place][split]["personal"]}
                for split, models in measured.items()
            }
            for place, measured in enumerate(replicas)
        ]

    def _record_of(self, records: list[Record]) -> Record | list[Record]:
        """A record of the replicas, with their share of the seconds."""
        found = [
            dataclasses.replace(
                record,
                seconds=record.seconds * self._share,
                measures=self._measures(record.measures, place),
            )
            for place, record in enumerate(records)
        ]
        return found[0] if self.replicas is None else found

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


def engine_of(whole: Engine, places: slice | int) -> Engine:
    """The engine of some replicas, or without replicas that of a single one.

    What it compiles serves all engines for as many replicas of the same engine.
    """

    def own(tree: PyTree, axis: int | None) -> PyTree:
        return tree if axis is None else trees.take(tree, places)

    several = isinstance(places, slice)
    found = Engine(
        whole.settings,
        key=own(whole.key, whole.keys),
        over=own(whole.over, whole.sweep),
        params=own(whole.params, whole.inits),
        own_params=several and whole.inits == 0,
        examples=whole.examples,
        central=whole.central,
        own_rows=several and whole.places == 0,
        replicas=len(range(whole.replicas or 1)[places]) if several else None,
        rounds=whole.rounds,
    )
    found.compiled = whole.compiled.setdefault(f"of {found.replicas} replicas", {})
    return found


class ClientsOfReplicas:
    """The rows and states of all clients, in some replicas."""

    def __init__(self, whole: Clients, places: slice | int):
        self._whole, self._places = whole, places
        self.number, self.shapes = whole.number, whole.shapes
        self._own_rows = whole.train.starts.ndim > 1

    def measured(
        self, ids: np.ndarray, splits: Iterable[str] = ()
    ) -> tuple[PyTree, Members, dict[str, PyTree], Places]:
        """States of clients to measure, and their rows, and where these start."""
        states, members, examples, places = self._whole.measured(ids, splits)
        members = members._replace(starts=self._own(members.starts))
        placed = {
            name: (self._own(starts), counts)
            for name, (starts, counts) in places.items()
        }
        return self._chosen(states), members, examples, placed

    def shard(self, client: int) -> Shard:
        """The training rows of one client."""
        shard = self._whole.shard(client)
        return dataclasses.replace(shard, start=self._own(shard.start))

    def states(self, ids: np.ndarray) -> PyTree:
        """What these clients remember, stacked."""
        return self._chosen(self._whole.states(ids))

    def _own(self, starts: jax.Array) -> jax.Array:
        return starts[self._places] if self._own_rows else starts

    def _chosen(self, states: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[:, self._places], states)

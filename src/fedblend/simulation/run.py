# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A simulation in progress: its blocks of rounds, its records, its results."""

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, Info, PyTree, static_bits
from fedblend.data.federated import FederatedData
from fedblend.errors import InputError, shorten
from fedblend.simulation import devices
from fedblend.simulation.cohort_loader import CohortLoader
from fedblend.simulation.communication import (
    CommunicationLog,
    Sizes,
    Totals,
    first_rejected,
    sizes_of,
)
from fedblend.simulation.engine import Engine
from fedblend.simulation.evaluate import Evaluation, add_local
from fedblend.simulation.pipeline import BlockLog, Pipeline
from fedblend.simulation.result import (
    ALWAYS,
    Bits,
    LocalBudget,
    Measures,
    Models,
    Record,
    Results,
    costs,
    not_finite,
    spreads,
    still_improving,
    summarize,
)
from fedblend.simulation.sampling import Cohorts
from fedblend.simulation.watchdog import Watch
from fedblend.stats.gains import Evidence, Measured


class Run(Results):
    """A simulation; loop over it for a record after every block of rounds.

    The first record is that of round 0: after enrollment and before any training.
    ``down`` is the server's message to the next cohort, with the shared model and
    ``extra``; ``server`` is the server's own state. Both are None before round 0, and
    with replicas their leaves are ``[replicas, ...]``.

    A run that nobody loops over is completed when a result is asked of it. With
    replicas (several keys, or a sweep) a record is a list of records, one for each, and
    so is every other result.

    ``settings`` are what was fixed when the run was set up, ``key`` its seed (or one
    for each replica), ``over`` what is swept, ``params`` the initial parameters, and
    ``shapes`` what server and one client exchange, as shapes and dtypes. With ``warns``
    it warns once, of the first client that has something that is not finite.
    """

    def __init__(
        self,
        engine: Engine,
        federated_data: FederatedData,
        clients: CohortLoader,
        cohorts: Cohorts,
        evaluation: Evaluation,
        rounds: int,
        every: int,
        local: "Run | None" = None,
    ):
        self._engine, self._clients, self._evaluation = engine, clients, evaluation
        self._local = local
        self._pipeline = Pipeline(engine, clients, cohorts, evaluation)
        self.settings, self.key, self.over = engine.settings, engine.key, engine.over
        self.shapes = clients.shapes
        self.federated_data, self.replicas = federated_data, engine.replicas
        self.cohorts, self.cohort = cohorts, cohorts.size
        self.rounds, self.every, self.round = rounds, every, 0
        self.warns = False
        self.records: list[Any] = []
        self.measured: list[Measured] = []
        self._rows: PyTree = ()
        self.budget: LocalBudget | None = None
        self.earlier_seconds = self.measure_seconds = 0.0
        self.down: Any = None
        self.server: PyTree = None
        sizes = sizes_of(clients.shapes)
        self._logs = [
            CommunicationLog(clients.number, sizes) for _ in range(self.replicas or 1)
        ]

    def __iter__(self) -> Iterator[Any]:
        """Go on from where the run is, a record after each block."""
        with Watch(self._engine.name) as watch:
            while self.down is None or self.round < self.rounds:
                watch.after = [self.round]
                try:
                    self._begin() if self.down is None else self._advance()
                except InputError as error:
                    raise shorten(error) from error.__cause__
                watch.after = []
                yield self.records[-1]

    def __len__(self) -> int:
        """The records of the whole run, that of round 0 included."""
        return 1 + -(-self.rounds // self.every)

    def __repr__(self) -> str:
        several = "" if self.replicas is None else f", {self.replicas} replicas"
        clients, at = self.federated_data.clients, f"{self.round} of {self.rounds}"
        return f"Run of {self.name}: {at} rounds, {clients} clients{several}"

    def complete(self) -> "Run":
        """Run to the end."""
        for _ in self:
            pass
        return self

    @property
    def algorithm(self) -> Algorithm:
        """What runs; of a sweep the first."""
        return self._engine.algorithm

    @property
    def name(self) -> str:
        """The function that made the algorithm, such as "flix"."""
        return self._engine.name

    @property
    def params(self) -> PyTree:
        """The initial parameters."""
        return self._engine.initial.params

    def wait(self) -> None:
        """Until the device rests: it may compute the next block while nobody asks."""
        self._pipeline.wait()
        jax.block_until_ready((self.down, self.server))

    @property
    def shared(self) -> PyTree:
        """The shared model."""
        return self._ready().down.shared

    def personal(self, client: int) -> PyTree:
        """The model that a client would deploy: parameters, or a ``Blend``."""
        state = self.client(client)
        shard = self._clients.shard(client)
        return self._engine.personal(self.down, state, shard)

    def personal_models(self, ids: Sequence[int] | np.ndarray) -> list[PyTree]:
        """The models of these clients in this order, on the host.

        They are equal to ``personal``, bit for bit: each is computed by itself.
        """
        states = jax.device_get(self.client_states(ids))
        shards = map(self._clients.shard, ids)
        return jax.device_get(
            [
                self._engine.personal(self.down, trees.take(states, place), shard)
                for place, shard in enumerate(shards)
            ]
        )

    def client(self, client: int) -> PyTree:
        """The state of a client."""
        if not 0 <= client < self._clients.number:
            raise ValueError(
                f"client: {client} is not between 0 and {self._clients.number - 1}"
            )
        return trees.take(self.client_states([client]), 0)

    def client_states(self, ids: Sequence[int] | np.ndarray | None = None) -> PyTree:
        """The states of these clients, stacked in this order; all clients if None.

        Leaves are ``[clients, ...]``, with replicas ``[clients, replicas, ...]``.
        """
        if ids is None:
            ids = np.arange(self._clients.number)
        self._ready()
        return self._clients.states(np.asarray(ids, np.int64))

    def info(self, ids: Sequence[int] | np.ndarray | None = None) -> Info:
        """The diagnostics that the algorithm names, such as alpha, over these clients.

        Arrays are ``[clients, ...]``, with replicas ``[clients, replicas, ...]``.
        """
        return self._engine.info(self.client_states(ids))

    def bits(self, replica: int = 0) -> Bits:
        """What each client has sent and received, in bits."""
        log = self._logs[replica]
        return Bits(log.up.copy(), log.down.copy())

    @property
    def message_bits(self) -> Sizes:
        """The bits of each kind of message to or from one client."""
        return self._logs[0].sizes

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling took."""
        return self._engine.programs.compile_seconds

    @property
    def measured_ids(self) -> np.ndarray:
        """The clients that are measured."""
        return self._evaluation.ids

    @property
    def evidence(self) -> Evidence:
        """What was measured last, for comparing models client by client."""
        of, rows = self._evaluation, list[Measured]()
        if self.measured:
            # They stay on the device until somebody asks for them.
            alone = () if self._local is None else self._local.evidence.by_row
            rows = of.split_replicas(self._rows, alone)
        return Evidence(self.measured, rows, of.counts, of.metrics, of.numbers)

    @property
    def alone(self) -> dict[str, Any] | None:
        """How long the clients trained that this run is compared with."""
        other = self._local
        if other is None:
            return None
        return (other.budget or LocalBudget(other.rounds))._asdict()

    def summary(self) -> Any:
        """The last record with totals, harmed clients and costs, as plain values.

        Its ``warnings`` say what is not finite.
        """
        self._ready()
        replicas = [self._summary(replica) for replica in range(self.replicas or 1)]
        return replicas[0] if self.replicas is None else replicas

    def _summary(self, replica: int) -> dict[str, Any]:
        history = self.history(replica)
        evidence = self.evidence.pick(replica)
        measured = evidence.measured[0] if evidence.measured else {}
        shared, alone = self._pick_replica(self.shared, replica), self.alone
        if alone is not None and self._local is not None:
            seconds = sum(record.seconds for record in self._local.history())
            alone["seconds"] = self._local.earlier_seconds + seconds
        spent = costs(
            history,
            self.bits(replica),
            cohort=self.cohort,
            last_bits=static_bits(self.shapes.last._replace(round=None)),
            alone=alone,
            compile_seconds=self.compile_seconds,
            measure_seconds=self.measure_seconds,
        )
        told = not_finite(history, measured, evidence.counts, shared)
        told += still_improving(alone)
        return {**summarize(history[-1], evidence, spent), "warnings": told}

    def frame(self) -> Any:
        """The records as a pandas frame: a line for each measured number.

        Its columns are ``seed`` (the number of the replica), ``round``, the costs of
        the block, ``split``, ``model``, ``metric``, and the fields of a ``Spread``.
        """
        from fedblend.report.measures import frame, rows_of

        return frame(rows_of(self._ready()))

    def save(self, folder: str | Path, name: str | None = None) -> Path:
        """Write the folder of this run, see ``runs.save``; ``fb.load`` reads it.

        It is completed if it is not. A folder that ``save`` wrote is replaced.
        """
        # That module knows runs, and is imported when it is asked.
        return import_module("fedblend.runs.save").save(self, folder, name)

    def report(self, path: str | Path) -> Path:
        """Write one HTML page about this run, and its folder beside it."""
        return import_module("fedblend.runs.save").report(self, path)

    def snapshot(self) -> PyTree:
        """The arrays that a checkpoint has to hold."""
        return {
            "server": (self.down, self.server),
            "store": self._clients.store.snapshot(),
            "communication": [log.snapshot() for log in self._logs],
        }

    def snapshot_template(self, changed: int) -> PyTree:
        """Shapes of a snapshot whose last block changed so many clients on disk."""
        begun = (self.shapes.down, self.shapes.server)
        return {
            "server": self._clients.stack_replicas(begun),
            "store": self._clients.store.template(changed),
            "communication": [log.snapshot() for log in self._logs],
        }

    def restore(self, snapshot: PyTree, round: int, records: list[Any]) -> None:
        """Go to where the run of a snapshot was."""
        self._clients.store.restore(snapshot["store"])
        self._pipeline.forget()
        self.down, self.server = jax.tree.map(jnp.asarray, snapshot["server"])
        for log, entry in zip(self._logs, snapshot["communication"], strict=True):
            log.restore(entry)
        self.round, self.records = round, records
        self._measure()

    @property
    def store_kind(self) -> str:
        """The kind of store that client states are in: "device", "host" or "disk"."""
        return self._clients.store.kind

    def use_store(self, kind: Any) -> None:
        """Before the run begins: have this kind of store, if that was left open."""
        self._clients.reopen(kind)

    def share_programs(self, other: "Run") -> None:
        """Use the programs of a run with the same arguments but other keys or ``over``.

        Before the run begins; its ``over`` has other values, of the same shapes.
        """
        self._engine.programs.compiled = other._engine.programs.compiled

    def select_replicas(self, places: slice | int, local: "Run | None" = None) -> "Run":
        """Some replicas of this completed run, as a run of their own.

        A sweep runs all its values as replicas of one simulation: the replicas of one
        value are what a run of that value alone would be.

        Args:
            places: of the replicas; a number makes a run without replicas.
            local: training alone to compare them with, with as many replicas; this
                run was not compared with any.
        """
        found = copy.copy(self)
        found._engine = engine = self._engine.select_replicas(places)
        found._clients = self._clients.select_replicas(places)
        found._evaluation = dataclasses.replace(
            self._evaluation, replicas=engine.replicas
        )
        found._local, found.replicas = local, engine.replicas
        found.key, found.over = engine.key, engine.over
        found.down, found.server, found._rows = trees.take(
            (self.down, self.server, self._rows), places
        )
        numbers = np.atleast_1d(np.arange(self.replicas or 1)[places]).tolist()
        share = len(numbers) / (self.replicas or 1)
        engine.programs.compile_seconds = share * self.compile_seconds
        found.measure_seconds = share * self.measure_seconds
        found._logs = [self._logs[number] for number in numbers]
        alone = [] if local is None else local.complete().measured
        measured = [self.measured[number] for number in numbers if self.measured]
        found.measured = add_local(measured, alone)
        asked, last = self._evaluation, []
        if local is not None:
            counts = asked.counts
            last = [spreads(one, counts, asked.metrics) for one in found.measured]

        def pick(record: Record, place: int) -> Record:
            """The record with its share of the seconds, and training alone."""
            measures = record.measures
            if local is not None:
                measures = Measures(
                    (split, Models({**models, "local": last[place][split]["local"]}))
                    for split, models in measures.items()
                )
            seconds = share * record.seconds
            return dataclasses.replace(record, seconds=seconds, measures=measures)

        records = [
            [pick(record[number], place) for place, number in enumerate(numbers)]
            for record in self.records
        ]
        single = found.replicas is None
        found.records = [each[0] if single else each for each in records]
        return found

    def _ready(self) -> "Run":
        return self.complete() if self.down is None else self

    def _pick_replica(self, values: PyTree, replica: int) -> PyTree:
        return values if self.replicas is None else trees.take(values, replica)

    def _begin(self) -> None:
        begun = self._engine.programs.clock()
        if (
            self.rounds
            and not self._engine.programs.compiled
            and devices.has_accelerator()
        ):
            self._pipeline.begin_compiling()
        joined = self._clients.enroll_first()
        if self._clients.joins:
            for log in self._logs:
                log.join(np.arange(self._clients.number))
        self.down, self.server = self._engine.start(joined)
        self._record(0, self._engine.programs.clock() - begun)

    def _advance(self) -> None:
        begun = self._engine.programs.clock()
        first, last = self.round, min(self.round + self.every, self.rounds)
        until = min(last + self.every, self.rounds)
        carry = (self.down, self.server)
        carry, entries, seconds = self._pipeline.advance(carry, first, last, until)
        self.down, self.server = carry
        self.round = last
        seconds = self._engine.programs.clock() - begun if seconds is None else seconds
        self._record(last - first, seconds, entries)

    def _measure(self) -> None:
        """Measure each replica's clients as they are now, if anything is asked for."""
        asked = self._evaluation
        if not asked.metrics:
            return
        alone = () if self._local is None else self._local.complete().measured
        begun = self._engine.programs.clock()
        values, self._rows = self._pipeline.measure(self.down)
        self.measured = asked.split_replicas(values, alone)
        self.measure_seconds += self._engine.programs.clock() - begun

    def _record(
        self, rounds: int, seconds: float, entries: Sequence[BlockLog] = ()
    ) -> None:
        """Measure, and add the record of a block of so many rounds."""
        self._measure()
        asked, records = self._evaluation, []
        for replica, sent in enumerate(self._logs):
            totals, begun = np.zeros(3, int), self.round - rounds
            place = replica if self._engine.keys == 0 else 0
            for ids, log, counted in entries:
                log = (ids[place], *self._pick_replica(log, replica))
                members, status, *bits = trees.take(log, slice(counted))
                totals += sent.enter(members, status, *bits)
                for place, client in first_rejected(members, status):
                    what = "its answer is not finite and is left out"
                    self._warn(begun + 1 + place, client, what)
                begun += counted
            measured = self.measured[replica] if self.measured else {}
            for client, what in self._not_finite(measured):
                self._warn(self.round, client, what)
            records.append(
                Record(
                    round=self.round,
                    rounds=rounds,
                    seconds=seconds,
                    **Totals(*totals.tolist())._asdict(),
                    bits_up=int(sent.up.sum()),
                    bits_down=int(sent.down.sum()),
                    measures=spreads(measured, asked.counts, asked.metrics),
                )
            )
        self.records.append(records[0] if self.replicas is None else records)

    def _not_finite(self, measured: Measured) -> Iterator[tuple[int, str]]:
        """Clients with rows and no finite loss, and what of theirs is not finite."""
        counts = self._evaluation.counts
        for split, models in measured.items():
            for model, metrics in models.items():
                for metric in ALWAYS if model != "local" else ():
                    values = metrics.get(metric, np.zeros(len(counts[split])))
                    bad = ~np.isfinite(values) & (counts[split] > 0)
                    for client in self.measured_ids[bad][:1]:
                        what = f"{split} {metric} of the {model} model is not finite"
                        yield int(client), what

    def _warn(self, round: int, client: int, what: str) -> None:
        """Warn, once in a run."""
        if self.warns:
            self.warns = False
            name = self.federated_data.name(client)
            warnings.warn(
                f"{self._engine.name}: round {round}: client {name!r}: {what}; try a "
                f"smaller rate, or look at fb.debug(..., clients=[{client}])",
                stacklevel=5,
            )

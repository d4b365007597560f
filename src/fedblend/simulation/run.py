# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A simulation in progress: its blocks of rounds, its records, its results."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Info, Key, PyTree, static_bits
from fedblend.data.federated import FederatedData
from fedblend.gains import Evidence, Measured
from fedblend.simulation.clients import Clients
from fedblend.simulation.communication import CommunicationLog, Sizes, Totals, sizes_of
from fedblend.simulation.early_stopping import Budget
from fedblend.simulation.engine import Engine
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.result import (
    Bits,
    Record,
    Results,
    costs,
    not_finite,
    spreads,
    summarize,
)
from fedblend.simulation.rounds import Log, Members, Settings, Shapes
from fedblend.simulation.sampling import Cohorts


class Run(Results):
    """A simulation; loop over it for a record after every block of rounds.

    The first record is that of round 0: after enrollment and before any training.
    ``down`` is the server's message to the next cohort, with the shared model and
    ``extra``; ``server`` is the server's own state. Both are None before round 0, and
    with replicas their leaves are ``[replicas, ...]``.

    A run that nobody loops over is completed when a result is asked of it. With
    replicas (several keys, or a sweep) a record is a list of records, one for each, and
    so is every other result.
    """

    def __init__(
        self,
        engine: Engine,
        federated_data: FederatedData,
        clients: Clients,
        cohorts: Cohorts,
        evaluation: Evaluation,
        rounds: int,
        every: int,
        replicas: int | None,
        local: "Run | None" = None,
    ):
        self._engine, self._clients, self._evaluation = engine, clients, evaluation
        self._local = local
        self.federated_data, self.replicas = federated_data, replicas
        self.cohorts, self.cohort = cohorts, cohorts.size
        self.rounds, self.every, self.round = rounds, every, 0
        self.records: list[Any] = []
        self.measured: list[Measured] = []
        self.by_row: list[Measured] = []
        self.budget: Budget | None = None
        self.earlier_seconds = 0.0
        self.down: Any = None
        self.server: PyTree = None
        sizes = sizes_of(clients.shapes)
        self._logs = [
            CommunicationLog(clients.number, sizes) for _ in range(replicas or 1)
        ]

    def __iter__(self) -> Iterator[Any]:
        """Go on from where the run is, a record after each block."""
        if self.down is None:
            self._begin()
            yield self.records[-1]
        while self.round < self.rounds:
            self._advance()
            yield self.records[-1]

    def complete(self) -> "Run":
        """Run to the end."""
        for _ in self:
            pass
        return self

    @property
    def shared(self) -> PyTree:
        """The shared model."""
        return self._ready().down.shared

    def personal(self, client: int) -> PyTree:
        """The model that a client would deploy: parameters, or a ``Blend``."""
        state = self.client(client)
        shard = self._clients.train.shard(client)
        return self._engine.personal(self.down, state, shard)

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
    def shapes(self) -> Shapes:
        """What server and one client exchange, as shapes and dtypes."""
        return self._clients.shapes

    @property
    def settings(self) -> Settings:
        """What was fixed when the run was set up."""
        return self._engine.settings

    @property
    def key(self) -> Key:
        """The seed, or one for each replica."""
        return self._engine.key

    @property
    def params(self) -> PyTree:
        """The initial parameters."""
        return self._engine.params

    @property
    def over(self) -> PyTree | None:
        """What is swept: a tree of arrays over the replicas, or None."""
        return self._engine.over

    @property
    def measured_ids(self) -> np.ndarray:
        """The clients that are measured."""
        return self._evaluation.ids

    @property
    def evidence(self) -> Evidence:
        """What was measured last, for comparing models client by client."""
        of = self._evaluation
        return Evidence(self.measured, self.by_row, of.counts, of.metrics)

    @property
    def alone(self) -> dict[str, Any] | None:
        """How long the clients trained that this run is compared with."""
        other = self._local
        if other is None:
            return None
        return (other.budget or Budget(other.rounds))._asdict()

    def summary(self) -> Any:
        """The last record with totals, harmed clients and costs, as plain values.

        Its ``warnings`` say what is not finite.
        """
        self._ready()
        replicas = [self._summary(replica) for replica in range(self.replicas or 1)]
        return replicas[0] if self.replicas is None else replicas

    def _summary(self, replica: int) -> dict[str, Any]:
        history = self.history(replica)
        evidence = self.evidence.of_replica(replica)
        measured = evidence.measured[0] if evidence.measured else {}
        shared = self._of_replica(self.shared, replica)
        spent = costs(
            history,
            self.bits(replica),
            cohort=self.cohort,
            last_bits=static_bits(self.shapes.last._replace(round=None)),
            alone=self._costs_alone(),
            compile_seconds=self._engine.compile_seconds,
        )
        warnings = not_finite(history, measured, evidence.counts, shared)
        return {**summarize(history[-1], evidence, spent), "warnings": warnings}

    def _costs_alone(self) -> dict[str, Any] | None:
        """What it took to train the clients that this run is compared with."""
        other = self._local
        if other is None:
            return None
        seconds = sum(block.seconds for block in other.history())
        return {**(self.alone or {}), "seconds": other.earlier_seconds + seconds}

    def plot(self, path: str | Path | None = None) -> Any:
        """Curves of the run as a matplotlib figure, saved to ``path`` if given."""
        from fedblend.report.figures import plot_run

        return plot_run(self._ready(), path, self.over)

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
            "server": self._clients.with_replicas(begun),
            "store": self._clients.store.template(changed),
            "communication": [log.snapshot() for log in self._logs],
        }

    def restore(self, snapshot: PyTree, round: int, records: list[Any]) -> None:
        """Go to where the run of a snapshot was."""
        self._clients.store.restore(snapshot["store"])
        self.down, self.server = jax.tree.map(jnp.asarray, snapshot["server"])
        for log, entry in zip(self._logs, snapshot["communication"], strict=True):
            log.restore(entry)
        self.round, self.records = round, records
        self._measure()

    @property
    def store_kind(self) -> str:
        """The kind of store that client states are in: "device", "host" or "disk"."""
        return self._clients.store.kind

    def _ready(self) -> "Run":
        return self.complete() if self.down is None else self

    def _of_replica(self, values: PyTree, replica: int) -> PyTree:
        return values if self.replicas is None else trees.take(values, replica)

    def _begin(self) -> None:
        begun, compiled = time.perf_counter(), self._engine.compile_seconds
        joined = self._clients.enroll_first()
        if self._clients.joins:
            for log in self._logs:
                log.join(np.arange(self._clients.number))
        self.down, self.server = self._engine.start(joined)
        compiled = self._engine.compile_seconds - compiled
        self._record(0, time.perf_counter() - begun - compiled)

    def _advance(self) -> None:
        begun, compiled = time.perf_counter(), self._engine.compile_seconds
        first, last = self.round, min(self.round + self.every, self.rounds)
        ids = self._draw(first, last)
        members, states = self._clients.load(ids, self.settings.chunk)
        if self._engine.keys is None:
            members = trees.take(members, 0)
        carry = (self.down, self.server)
        carry, states, log = jax.block_until_ready(
            self._engine.block(self.shapes, carry, states, members, first, last)
        )
        self.down, self.server = carry
        self._clients.store.save(ids, states)
        self.round = last
        compiled = self._engine.compile_seconds - compiled
        seconds = time.perf_counter() - begun - compiled
        self._record(last - first, seconds, members, log)

    def _draw(self, first: int, last: int) -> np.ndarray:
        """The cohorts of a block, [keys, rounds, cohort]."""
        roots = self.key if self._engine.keys == 0 else self.key[None]
        # Rounds beyond the last only fill the shape; the block does not reach them.
        numbers = np.minimum(np.arange(first, first + self.every), last - 1)
        return np.stack([self.cohorts.draw(root, numbers.tolist()) for root in roots])

    def _measure(self) -> None:
        """Measure each replica's clients as they are now, if anything is asked for."""
        asked = self._evaluation
        if not asked.metrics:
            return
        ids = asked.padded_ids
        states = self._clients.states(ids)
        values = self._engine.measure(
            asked, self.down, states, self._clients.members(ids)
        )
        alone = None if self._local is None else self._local.complete().evidence
        self.measured, self.by_row = asked.by_replica(values, alone)

    def _record(
        self,
        rounds: int,
        seconds: float,
        members: Members | None = None,
        log: Log | None = None,
    ) -> None:
        """Measure, and add the record of a block of so many rounds."""
        self._measure()
        asked, records = self._evaluation, []
        for replica, sent in enumerate(self._logs):
            totals = Totals(0, 0, 0)
            if members is not None and log is not None:
                own = self._engine.keys == 0
                ids = self._of_replica(members.ids, replica) if own else members.ids
                of = jax.tree.map(np.asarray, (ids, self._of_replica(log, replica)))
                ids, counted = trees.take(of, slice(rounds))
                totals = sent.enter(ids, *counted)
            measured = self.measured[replica] if self.measured else {}
            records.append(
                Record(
                    round=self.round,
                    rounds=rounds,
                    seconds=seconds,
                    **totals._asdict(),
                    bits_up=int(sent.up.sum()),
                    bits_down=int(sent.down.sum()),
                    measures=spreads(measured, asked.counts, asked.metrics),
                )
            )
        self.records.append(records[0] if self.replicas is None else records)

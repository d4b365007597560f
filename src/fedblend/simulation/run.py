# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A run in progress: its state, its records, and what one may ask of it."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Info, Key, PyTree, static_bits
from fedblend.data.federated import FederatedData, Shards
from fedblend.simulation import aggregators
from fedblend.simulation.client_store import open_store
from fedblend.simulation.communication import CommunicationLog, Sizes, Totals
from fedblend.simulation.early_stopping import Budget
from fedblend.simulation.engine import Engine
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.finite import not_finite
from fedblend.simulation.result import (
    Bits,
    Evidence,
    Measured,
    Record,
    Results,
    costs,
    spreads,
    summarize,
)
from fedblend.simulation.rounds import Members
from fedblend.simulation.sampling import Strata, drawing

ENROLL_AT_ONCE = 1024
"""Clients enrolled in one call; bounds the memory it takes."""


class Run(Results):
    """A simulation; loop over it for a record after every block of rounds.

    A run that nobody loops over is completed when a result is asked of it. With
    replicas (several keys, or a sweep) a record is a list of records, one for each, and
    so is every other result.
    """

    def __init__(
        self,
        engine: Engine,
        federated_data: FederatedData,
        train: Shards,
        *,
        replicas: int | None,
        rounds: int,
        cohort: int,
        strata: Strata | None,
        epoch: int | None,
        always: np.ndarray | None,
        every: int,
        weights: tuple[np.ndarray, np.ndarray],
        store: tuple[str, Any],
        measuring: Evaluation,
    ):
        self._engine = engine
        self.federated_data, self.replicas = federated_data, replicas
        self.train = train
        self.rounds, self.cohort, self.every = rounds, cohort, every
        self.round = 0
        self.records: list[Any] = []
        self.measured: list[Measured] = []
        self.brought: list[Measured] = []
        self._measuring, self.strata, self.epoch = measuring, strata, epoch
        self._joining, self._weights = weights
        self._draw = drawing(federated_data.clients, cohort, strata, epoch, always)
        self.budget: Budget | None = None
        self.earlier_seconds = 0.0
        members = self._members(np.zeros(1, int))
        members = members._replace(starts=members.starts.reshape(-1))
        member = jax.tree.map(lambda leaf: leaf[0], members)
        self.shapes = shapes = engine.shapes(member)
        template = self.with_replicas(shapes.state)
        self._store = open_store(store[0], template, federated_data.clients, store[1])
        silent = not jax.tree.leaves(shapes.message.shared)
        enrolls = bool(jax.tree.leaves((shapes.join, shapes.state))) and not silent
        sizes = Sizes(
            up=static_bits(shapes.up),
            # The number of the round is the runtime's own and not counted.
            down=static_bits(shapes.message._replace(round=None)),
            join=static_bits(shapes.join),
            params=static_bits(shapes.params) if enrolls else 0,
        )
        self._ledgers = [
            CommunicationLog(federated_data.clients, sizes)
            for _ in range(replicas or 1)
        ]
        self.down: Any = None
        self.server: Any = None

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

    def client(self, client: int) -> PyTree:
        """What a client remembers."""
        if not 0 <= client < self.federated_data.clients:
            raise ValueError(
                f"client: {client} is not between 0 and "
                f"{self.federated_data.clients - 1}"
            )
        return trees.take(self.client_states([client]), 0)

    def client_states(self, ids: Sequence[int] | np.ndarray | None = None) -> PyTree:
        """What these clients remember, stacked in this order; all clients if None."""
        if ids is None:
            ids = np.arange(self.federated_data.clients)
        ids = np.asarray(ids, np.int64)
        self._ready()._enroll(ids)
        return self._store.gather(ids)

    def info(self, ids: Sequence[int] | np.ndarray | None = None) -> Info:
        """The diagnostics that the algorithm names, such as alpha, over these clients.

        Arrays over clients; with replicas these are the second axis.
        """
        return self._engine.info(self.client_states(ids))

    def bits(self, replica: int = 0) -> Bits:
        """What each client has sent and received, in bits."""
        ledger = self._ledgers[replica]
        return Bits(ledger.up.copy(), ledger.down.copy())

    @property
    def message_bits(self) -> Sizes:
        """The bits of each kind of message to or from one client."""
        return self._ledgers[0].sizes

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
        return self._measuring.ids

    def personal(self, client: int) -> PyTree:
        """The model that a client would deploy: parameters, or a ``Blend``."""
        state = self.client(client)
        shard = self.train.shard(client)
        return self._engine.personal(self.down, state, shard)

    def summary(self) -> Any:
        """The last record with totals, harmed clients and costs, as plain values.

        Its ``warnings`` say what is not finite.
        """
        self._ready()
        replicas = [self._summary(replica) for replica in range(self.replicas or 1)]
        return replicas[0] if self.replicas is None else replicas

    @property
    def alone(self) -> dict[str, Any] | None:
        """How long the clients trained that this run is compared with."""
        other = self._measuring.local
        return (
            None if other is None else (other.budget or Budget(other.rounds))._asdict()
        )

    def _summary(self, replica: int) -> dict[str, Any]:
        records = self.history(replica)
        measured = self.measured[replica] if self.measured else {}
        shared = (
            self.shared if self.replicas is None else trees.take(self.shared, replica)
        )
        odd = not_finite(records, measured, self._measuring.counts, shared)
        evidence = self.evidence.of_replica(replica)
        found = summarize(records[-1], evidence, self._costs(replica))
        return {**found, "warnings": odd}

    def _costs(self, replica: int) -> dict[str, Any]:
        last = self.shapes.last._replace(round=None)
        return costs(
            self.history(replica),
            self.bits(replica),
            cohort=self.cohort,
            last_bits=static_bits(last),
            alone=self._costs_alone(),
            compile_seconds=self._engine.compile_seconds,
        )

    def _costs_alone(self) -> dict[str, Any] | None:
        """What it took to train the clients that this run is compared with."""
        other = self._measuring.local
        if other is None:
            return None
        seconds = sum(block.seconds for block in other.history())
        return {**(self.alone or {}), "seconds": other.earlier_seconds + seconds}

    def plot(self, path: Any = None) -> Any:
        """Curves of the run as a matplotlib figure, saved to ``path`` if given."""
        from fedblend.report.figures import plot_run

        return plot_run(self._ready(), path)

    @property
    def evidence(self) -> Evidence:
        """What was measured last, for comparing models client by client."""
        return Evidence(
            self.measured, self.brought, self._measuring.counts, self._measuring.metrics
        )

    def measure(self) -> None:
        """Measure each replica's clients as they are now, if anything is asked for."""
        if not self._measuring.metrics:
            return
        padded = self._measuring.padded_ids
        self._enroll(padded)
        self.measured, self.brought = self._measuring.look(
            self.down, self._store.gather(padded), self._members(padded)
        )

    def with_replicas(self, shapes: PyTree) -> PyTree:
        """Shapes of one replica as they are in this run."""
        ahead = () if self.replicas is None else (self.replicas,)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(ahead + leaf.shape, leaf.dtype), shapes
        )

    def _ready(self) -> "Run":
        return self.complete() if self.down is None else self

    def _of_replica(self, values: Any, replica: int) -> Any:
        return values if self.replicas is None or values is None else values[replica]

    def _begin(self) -> None:
        begun = time.perf_counter()
        compiled = self._engine.compile_seconds
        everybody = np.arange(self.federated_data.clients)
        if jax.tree.leaves(self.shapes.join):
            running_sum = self._enroll(everybody)
            for ledger in self._ledgers:
                ledger.join(everybody)
        else:
            if self._store.eager:
                self._enroll(everybody)
            running_sum = self._per_replica(aggregators.empty(self.shapes.join))
        self.down, self.server = self._engine.start(running_sum)
        compiled = self._engine.compile_seconds - compiled
        self._record(0, time.perf_counter() - begun - compiled, None)

    def _per_replica(self, tree: PyTree) -> PyTree:
        if self.replicas is None:
            return tree
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (self.replicas, *leaf.shape)), tree
        )

    def _members(
        self, ids: np.ndarray, slots=None, present=None, weights=None
    ) -> Members:
        """Arrays over these clients, as the compiled functions take them."""
        starts = self.train.starts
        if starts.ndim == 2 and ids.ndim == 3:  # a replica of its own for each split
            starts = starts[np.arange(len(starts))[:, None, None], ids]
        else:
            starts = starts[..., ids]
        present = np.ones(ids.shape, bool) if present is None else present
        weights = self._weights if weights is None else weights
        return Members(
            ids=jnp.asarray(ids, jnp.int32),
            slots=jnp.asarray(ids if slots is None else slots, jnp.int32),
            starts=jnp.asarray(starts, jnp.int32),
            counts=jnp.asarray(self.train.counts[ids], jnp.int32),
            weights=jnp.asarray(weights[ids] * present, float),
            present=jnp.asarray(present),
        )

    def _enroll(self, ids: np.ndarray) -> Any:
        """Enroll those of these clients who are not known yet; their joins' tally."""
        newcomers = np.unique(ids)
        newcomers = newcomers[~self._store.known[newcomers]]
        running_sum = None
        if not jax.tree.leaves((self.shapes.join, self.shapes.state)):
            return running_sum
        room = min(ENROLL_AT_ONCE, self.federated_data.clients)
        if not self._store.eager and not jax.tree.leaves(self.shapes.join):
            room = min(room, self.every * self.cohort * (self.replicas or 1))
        for first in range(0, len(newcomers), room):
            group = newcomers[first : first + room]
            padded = np.concatenate([group, np.full(room - len(group), group[0])])
            present = np.arange(room) < len(group)
            these = self._members(padded, None, present, self._joining)
            part, states = self._engine.enroll(these)
            # Sliced on the host: on the device every new length would be compiled.
            rows = trees.take(jax.device_get(states), slice(len(group)))
            self._store.write(group, rows)
            running_sum = (
                part
                if running_sum is None
                else jax.tree.map(jnp.add, running_sum, part)
            )
        return running_sum

    def _advance(self) -> None:
        begun, compiled = time.perf_counter(), self._engine.compile_seconds
        first, last = self.round, min(self.round + self.every, self.rounds)
        ids, plan, states = self._plan(first, last)
        carry = (self.down, self.server)
        carry, states, log = jax.block_until_ready(
            self._engine.block(self.shapes, carry, states, plan, first, last)
        )
        self.down, self.server = carry
        self._store.save(ids, states)
        self.round = last
        compiled = self._engine.compile_seconds - compiled
        self._record(last - first, time.perf_counter() - begun - compiled, (plan, log))

    def _plan(self, first: int, last: int) -> tuple[np.ndarray, Members, PyTree]:
        """The block's ids, its members, and the states they need."""
        chunk, clients = self._engine.settings.chunk, self.federated_data.clients
        roots = self._engine.key if self._engine.keys == 0 else self._engine.key[None]
        # Rounds beyond the last only fill the shape; the block does not reach them.
        numbers = np.minimum(np.arange(first, first + self.every), last - 1)
        ids = np.stack([self._draw(root, numbers.tolist()) for root in roots])
        self._enroll(ids)
        states, slots = self._store.load(ids, min(clients, ids.size))
        gap = [(0, 0), (0, 0), (0, -self.cohort % chunk)]
        padded = np.pad(ids, gap)
        present = np.pad(np.ones(ids.shape, bool), gap)
        slots = np.pad(slots, gap, constant_values=clients)
        plan = self._members(padded, slots, present)
        if self._engine.keys is None:
            plan = trees.take(plan, 0)
        return ids, plan, states

    def _record(self, count: int, seconds: float, news: Any) -> None:
        """Measure, and write down what a block of ``count`` rounds brought."""
        self.measure()
        records = []
        for replica, ledger in enumerate(self._ledgers):
            totals = Totals(0, 0, 0)
            if news is not None:
                plan, log = news
                ids = (
                    self._of_replica(plan.ids, replica)
                    if self._engine.keys == 0
                    else plan.ids
                )
                parts = (ids, *(self._of_replica(part, replica) for part in log))
                totals = ledger.enter(*(_first(part, count) for part in parts))
            measured = self.measured[replica] if self.measured else {}
            records.append(
                Record(
                    round=self.round,
                    rounds=count,
                    seconds=seconds,
                    **totals._asdict(),
                    bits_up=int(ledger.up.sum()),
                    bits_down=int(ledger.down.sum()),
                    measures=spreads(
                        measured, self._measuring.counts, self._measuring.metrics
                    ),
                )
            )
        self.records.append(records[0] if self.replicas is None else records)


def _first(part: Any, count: int) -> Any:
    return None if part is None else np.asarray(part)[:count]

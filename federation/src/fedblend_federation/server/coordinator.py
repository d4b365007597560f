# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The coordinator: the server's half of an algorithm, over any transport.

It never sees a row of a client. It draws cohorts by client id as the simulator does,
checks replies against shapes known beforehand, then for finite numbers and for their
norms, and sums them in the order of client ids by the simulator's reducer. The caller
saves a checkpoint after every step, so that a server that was killed goes on with the
step it was in; clients whose replies were not counted go on from their last counted
state.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.core import PyTree, static_bits
from fedblend.simulation.communication import CommunicationLog, sizes_of
from fedblend.simulation.result import (
    Bits,
    Record,
    Results,
    costs,
    spreads,
    summarize,
)
from fedblend.simulation.rounds import shard_of
from fedblend.simulation.sampling import cohorts, secret_cohorts
from fedblend.stats.gains import Evidence, Measured
from fedblend_federation.contract import deployment
from fedblend_federation.message import ENROLLED, UNKNOWN, Message, payload_of
from fedblend_federation.secure.server import SecureCollector
from fedblend_federation.server import aggregation
from fedblend_federation.server.aggregation import Aggregator
from fedblend_federation.server.collection import AuditedExchange, PlainCollector
from fedblend_federation.server.membership import Membership
from fedblend_federation.server.settings import (
    BelowQuorum,
    RoundRules,
    ServerSetup,
    first_member,
    rowless_data,
    rowless_engine,
)
from fedblend_federation.transport import Replies

INTERVAL = ("rounds", "seconds", "received", "dropped", "rejected")
"""What a record counts since the record before."""


class Coordinator(Results):
    """A federation in progress: take steps until it is done."""

    replicas = None

    def __init__(self, setup: ServerSetup, peers: Membership, rules: RoundRules):
        self.setup, self.peers, self.rules = setup, peers, rules
        self.algorithm, self.clients = setup.algorithm, len(setup.counts["train"])
        self.federated_data = rowless_data(setup.counts)
        self.engine, self.weights = rowless_engine(setup, rules, self.federated_data)
        self.active = np.setdiff1d(np.arange(self.clients), list(setup.absent))
        self.rounds, self.round, self.quorum = rules.rounds, 0, rules.least
        # Memories of both sides must agree, and so must what stands for a length.
        meant = self.algorithm.needs.mean or self.algorithm.needs.length
        clip = None if meant else rules.clip_ratio
        self.norm_history = aggregation.NormHistory(rules.norm_ratio, clip)
        self.interval: dict[str, Any] = dict.fromkeys(INTERVAL, 0)
        self.records: list[Record] = []
        self.measured: list[Measured] = []
        self.down: Any = None
        self.server: Any = None
        self.bases = np.full(self.clients, UNKNOWN, np.int64)
        self.requests: dict[int, PyTree] = {}
        self.exchanges = AuditedExchange(peers, rules, setup.note, setup.names)
        member = first_member(self.federated_data)
        self.shapes = self.engine.shapes(member)
        shard = shard_of(self.engine.settings, self.engine.examples["train"], member)
        self.request = jax.eval_shape(self.algorithm.wire.ask, self.shapes.state, shard)
        self.aggregator = Aggregator(self.engine, self.shapes, rules)
        sizes = sizes_of(self.shapes)
        collector = PlainCollector if setup.secure is None else SecureCollector
        self.collector = collector(self, sizes)
        self.ledger = CommunicationLog(self.clients, self.collector.sizes)
        self._tell = jax.jit(self.algorithm.wire.tell)
        self._deploy = jax.jit(partial(deployment, self.algorithm))

    @property
    def shared(self) -> PyTree:
        """The shared model."""
        return self.down.shared

    @property
    def done(self) -> bool:
        """Whether all rounds are counted, and measured."""
        return self.down is not None and self.round == self.rounds and not self._due()

    def step(self) -> None:
        """Begin, or run a round, or measure, whichever comes next.

        Raises:
            BelowQuorum: too few clients replied; nothing has changed.
        """
        if self.down is None:
            self._begin()
        elif self._due():
            self._measure()
        else:
            self._run_round()

    def enroll_again(self, clients: Sequence[int]) -> None:
        """Enroll these clients as new ones, because they have lost their states.

        Raises:
            ValueError: the server keeps something of theirs that would be wrong.
        """
        if clients and self.algorithm.needs.memories:
            raise ValueError(
                f"client {clients[0]}: cannot be enrolled again, this algorithm's "
                "server keeps the mean of the clients' memories"
            )
        for client in clients:
            self.bases[client] = UNKNOWN
            self.requests.pop(client, None)
            self.setup.note("to be enrolled again", client=client)

    def stop(self, *, over: bool) -> None:
        """Tell the clients that the experiment stops, for good or to go on later."""
        enrolled = np.flatnonzero(self.bases != UNKNOWN).tolist()
        self.exchanges.stop(self.setup.experiment, enrolled, over)

    def summary(self) -> dict[str, Any]:
        """The last record with totals, harmed clients and costs, as plain values."""
        spent = costs(
            self.records,
            self.bits(),
            cohort=self.rules.cohort,
            last_bits=static_bits(self.shapes.last._replace(round=None)),
            alone=self.alone,
            strays=dict(self.exchanges.strays),
        )
        return summarize(self.records[-1], self.evidence, spent)

    @property
    def alone(self) -> dict[str, Any] | None:
        """How long clients train alone, to compare with."""
        return self.setup.alone

    @property
    def measured_ids(self) -> np.ndarray:
        """All clients are measured."""
        return np.arange(self.clients)

    def bits(self, replica: int = 0) -> Bits:
        """What each client has sent and received, in bits."""
        del replica
        return Bits(self.ledger.up, self.ledger.down)

    @property
    def evidence(self) -> Evidence:
        """What clients measured last; single rows stay with them."""
        return Evidence(self.measured, (), self.setup.counts, self.setup.metrics)

    def _due(self) -> bool:
        """Whether the round that was counted last has yet to be measured."""
        at_end = self.round % self.rules.every == 0 or self.round == self.rounds
        return at_end and (not self.records or self.records[-1].round < self.round)

    def _begin(self) -> None:
        joins = self.aggregator.sum_joins([], self.weights[:0])
        if jax.tree.leaves(self.shapes.join):
            replies = self._enroll(self.active)
            try:
                joins = self.collector.joins(replies)
            except BelowQuorum:
                self.bases[:] = UNKNOWN
                raise
            self.ledger.join(self.active)
        self.down, self.server = self.aggregator.start(joins)

    def _enroll(self, clients: np.ndarray) -> Replies:
        """Enroll those of these clients who are not; each one's join and request."""
        experiment, terms = self.setup.experiment, self.setup.terms
        head = Message("enroll", experiment, UNKNOWN, fields=terms)
        template = (self.collector.join, self.request)
        requests = {
            client: (head._replace(client=client), self.engine.initial.params)
            for client in clients.tolist()
            if self.bases[client] == UNKNOWN
        }

        def accept(reply: Message) -> tuple[PyTree, PyTree, tuple[float, ...]]:
            found = jax.tree.map(jnp.asarray, payload_of(reply, template))
            return *found, self.aggregator.check_join(*found)

        replies = self.exchanges.exchange(requests, accept)
        for client, (_, request, _) in replies.accepted.items():
            self.bases[client] = ENROLLED
            self.requests[client] = request
        return replies

    def cohort(self, number: int) -> np.ndarray:
        """The clients that take part in a round; a secret cohort is drawn anew."""
        size = min(self.rules.cohort + self.rules.spare, len(self.active))
        if self.algorithm.needs.secret_cohorts:
            (drawn,) = secret_cohorts(1, len(self.active), size)
        else:
            (drawn,) = cohorts(self.engine.key, [number], len(self.active), size)
        return self.active[drawn]

    def _run_round(self) -> None:
        """One round, counted if enough of its members reply."""
        started, number = time.perf_counter(), self.round
        members = self.cohort(number)
        enrolled = self._enroll(members)
        requests, experiment = {}, self.setup.experiment
        for client in members[self.bases[members] != UNKNOWN].tolist():
            down = self._tell(self.down, self.requests[client])._replace(round=None)
            base = int(self.bases[client])
            head = Message("round", experiment, client, number, base=base)
            requests[client] = (head, down)
        total, replies, asks = self.collector.updates(members, requests, enrolled)
        counted = sorted(replies.accepted)
        key = keys.derive(self.engine.key, "server", number)
        self.down, self.server = self.aggregator.step(
            total, self.down, self.server, key
        )
        totals = aggregation.enter_round(
            self.ledger, self.shapes, members, replies, requests
        )
        self.bases[counted] = number
        self.requests.update(asks)
        self.round = number + 1
        seconds = time.perf_counter() - started
        found = {"rounds": 1, "seconds": seconds, **totals._asdict()}
        self.interval = {name: n + found[name] for name, n in self.interval.items()}
        others = aggregation.reasons(replies, names=self.setup.names)
        self.setup.note("round", round=number, counted=len(counted), others=others)

    def _measure(self) -> None:
        """Ask all clients for their measures, and write a record."""
        self._enroll(self.active)
        requests, last = {}, {"last": self.round == self.rounds}
        head = Message(
            "measure", self.setup.experiment, UNKNOWN, self.round, fields=last
        )
        for client in np.flatnonzero(self.bases != UNKNOWN).tolist():
            own = self.requests[client]
            deployed = self._deploy(self.down, own, self.engine.initial.params)
            payload = deployed._replace(message=deployed.message._replace(round=None))
            base = int(self.bases[client])
            requests[client] = (head._replace(client=client, base=base), payload)
        accept = partial(aggregation.measures, self.setup.metrics)
        replies = self.exchanges.exchange(requests, accept, least=0)
        counts, metrics = self.setup.counts, self.setup.metrics
        measured = aggregation.table(replies.accepted, self.clients, counts)
        self.records.append(
            Record(
                round=self.round,
                **self.interval,
                bits_up=int(self.ledger.up.sum()),
                bits_down=int(self.ledger.down.sum()),
                measures=spreads(measured, counts, metrics),
            )
        )
        self.measured = [measured]
        self.interval = dict.fromkeys(INTERVAL, 0)

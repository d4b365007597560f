# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server of a federation: the algorithm's other half, over any post.

It never sees a row of a client. Members of a cohort are drawn by client id as in the
simulator; what they say is checked against shapes known beforehand, then for finite
numbers and length, and summed in the order of client ids by the simulator's reducer.
The caller writes the books (``books``) after every step, so that a server that is
killed goes on with the step it was in; who was not counted has not moved on.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.core import PyTree, Shard, has_ragged, ragged_bits, static_bits
from fedblend.deploy import messages
from fedblend.deploy.client.executor import deployment
from fedblend.deploy.messages import ENROLLED, UNKNOWN, Message
from fedblend.deploy.server import aggregation
from fedblend.deploy.server.membership import Membership
from fedblend.deploy.server.settings import BelowQuorum, News, RoundRules, Setting
from fedblend.deploy.transport import Answers, exchange
from fedblend.gains import Evidence, Measured
from fedblend.simulation import aggregators
from fedblend.simulation.communication import CommunicationLog, Totals, sizes_of
from fedblend.simulation.result import (
    Bits,
    Record,
    Results,
    costs,
    spreads,
    summarize,
)
from fedblend.simulation.rounds import Members
from fedblend.simulation.sampling import cohorts

KINDS_OF_STRAYS = 1000
"""Different ones that are remembered: others choose what they send us."""


class Coordinator(Results):
    """A federation in progress: take steps until it is done."""

    replicas = None

    def __init__(self, setting: Setting, directory: Membership, rules: RoundRules):
        self.setting, self.directory, self.rules = setting, directory, rules
        self.engine, self.federated_data = setting.engine, setting.federated_data
        self.algorithm = self.engine.settings.build(None)
        self.rounds, self.round, self.news = rules.rounds, 0, News()
        self.records: list[Record] = []
        self.measured: list[Measured] = []
        self.down: Any = None
        self.server: Any = None
        self.bases = np.full(self.federated_data.clients, UNKNOWN, np.int64)
        self.requests: dict[int, PyTree] = {}
        self.strays: Counter = Counter()
        member = self._member(0)
        self.shapes = shapes = self.engine.shapes(member)
        shard = Shard(
            self.engine.examples["train"],
            member.starts,
            member.counts,
            member.ids,
            self.engine.settings.capacity,
        )
        self.request = jax.eval_shape(self.algorithm.ask, shapes.state, shard)
        self.ledger = CommunicationLog(self.federated_data.clients, sizes_of(shapes))
        self._decode = jax.jit(self.algorithm.decode)
        self._add = jax.jit(partial(aggregation.add, self.algorithm))
        self._conclude = jax.jit(
            partial(aggregation.conclude, self.algorithm, self.engine.settings)
        )
        self._tell = jax.jit(self.algorithm.tell)
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
        """Begin, or count a round, or measure, whichever comes next.

        Raises:
            BelowQuorum: too few were heard; nothing has changed.
        """
        if self.down is None:
            self._begin()
        elif self._due():
            self._measure()
        else:
            self._advance()

    def enroll_again(self, clients: Sequence[int]) -> None:
        """Take these clients for newcomers, because they have lost their states.

        Raises:
            ValueError: the server remembers something of theirs that would be wrong.
        """
        if clients and self.algorithm.needs.memories:
            raise ValueError(
                f"client {clients[0]}: cannot be enrolled again, this algorithm's "
                "server keeps the mean of what clients remember"
            )
        for client in clients:
            self.bases[client] = UNKNOWN
            self.requests.pop(client, None)
            self.setting.note("to be enrolled again", client=client)

    def summary(self) -> dict[str, Any]:
        """The last record with totals, harmed clients and costs, as plain values."""
        spent = costs(
            self.records,
            self.bits(),
            cohort=self.rules.cohort,
            last_bits=static_bits(self.shapes.last._replace(round=None)),
            alone=self.alone,
            strays=dict(self.strays),
        )
        return summarize(self.records[-1], self.evidence, spent)

    @property
    def alone(self) -> dict[str, Any] | None:
        """How long clients train alone, to compare with."""
        return self.setting.alone

    @property
    def measured_ids(self) -> np.ndarray:
        """All clients are measured."""
        return np.arange(self.federated_data.clients)

    def bits(self, replica: int = 0) -> Bits:
        """What each client has sent and received, in bits."""
        del replica
        return Bits(self.ledger.up, self.ledger.down)

    @property
    def evidence(self) -> Evidence:
        """What clients told last; single rows stay with them."""
        splits = self.federated_data.splits.items()
        counts = {name: split.counts for name, split in splits}
        return Evidence(self.measured, (), counts, self.setting.metrics)

    def _due(self) -> bool:
        """Whether the round that was counted last has yet to be measured."""
        at_end = self.round % self.rules.every == 0 or self.round == self.rounds
        return at_end and (not self.records or self.records[-1].round < self.round)

    def _begin(self) -> None:
        running_sum = aggregators.empty(self.shapes.join)
        if jax.tree.leaves(self.shapes.join):
            everybody = np.arange(self.federated_data.clients)
            answers = self._enroll(everybody)
            if len(answers.good) < len(everybody):
                self.bases[:] = UNKNOWN
                raise BelowQuorum(
                    "enrollment: all clients must be heard before the first round; "
                    + aggregation.reasons(answers)
                )
            for client in everybody.tolist():
                join, _ = answers.good[client]
                running_sum = aggregation.add_alone(
                    running_sum, join, self._weight(client)
                )
            self.ledger.join(everybody)
        self.down, self.server = self.engine.start(running_sum)

    def _enroll(self, clients: np.ndarray) -> Answers:
        """Enroll those of these clients who are not; what each says and asks for."""
        head = Message("enroll", self.setting.experiment, UNKNOWN)
        head = head._replace(words=self.setting.terms)
        template = (self.shapes.join, self.request)
        asked = {
            int(client): (head._replace(client=int(client)), self.engine.params)
            for client in clients
            if self.bases[client] == UNKNOWN
        }

        def take(message: Message) -> tuple[PyTree, PyTree]:
            key = keys.at(self.engine.key, "enroll", 0, message.client)
            said = jax.tree.map(jnp.asarray, messages.content(message, template, key))
            aggregation.check(said)
            aggregation.check(said[0], self.rules.longest_rest)
            return said

        answers = self._ask(asked, take)
        for client, (_, request) in answers.good.items():
            self.bases[client] = ENROLLED
            self.requests[client] = request
        return answers

    def _advance(self) -> None:
        """One round, counted if enough of its members are heard."""
        begun, number = time.perf_counter(), self.round
        cohort, clients = self.rules.cohort, self.federated_data.clients
        size = min(cohort + self.rules.spare, clients)
        (members,) = cohorts(self.engine.key, [number], clients, size)
        enrolled = self._enroll(members)
        asked = {
            client: (
                Message("round", self.setting.experiment, client, number)._replace(
                    base=int(self.bases[client])
                ),
                self._tell(self.down, self.requests[client])._replace(round=None),
            )
            for client in members.tolist()
            if self.bases[client] != UNKNOWN
        }
        answers = self._ask(asked, self._take_up, enough=cohort)
        heard = sorted(answers.good)
        least = self.rules.least
        if len(heard) < least:
            why = aggregation.reasons(answers, enrolled)
            raise BelowQuorum(
                f"round {number}: {len(heard)} of {cohort} clients were heard, the "
                f"quorum is {least}; {why}"
            )
        self._hear({client: answers.good[client][0] for client in heard})
        totals = self._count(members, answers, asked)
        for client in heard:
            self.bases[client] = number
            request = answers.good[client][1]
            if request is not None:
                self.requests[client] = request
        self.round = number + 1
        self.news = self.news.plus(time.perf_counter() - begun, totals)
        self.setting.note(
            "counted",
            round=number,
            heard=len(heard),
            others=aggregation.reasons(answers),
        )

    def _take_up(self, message: Message) -> tuple[PyTree, PyTree | None]:
        """What a client says of a round, and its request if that has changed."""
        asks = message.words.get("asked") is True
        template = (self.shapes.up, self.request if asks else ())
        key = keys.at(self.engine.key, "client", message.round, message.client)
        said = messages.content(message, template, key, self.down)
        said = jax.tree.map(jnp.asarray, said)
        aggregation.check(said)
        up, request = said
        # What is finite as it travels need not be when it is decoded.
        decoded = self._decode(up)
        aggregation.check(decoded)
        aggregation.check(decoded.delta, self.rules.longest)
        aggregation.check(decoded.extra, self.rules.longest_rest)
        return up, request if asks else None

    def _hear(self, ups: Mapping[int, PyTree]) -> None:
        """Sum the ups in the order of client ids, and let the server act."""
        running_sum = aggregators.empty(self.shapes.decoded)
        decoded = []
        for client in sorted(ups):
            running_sum, up = self._add(running_sum, ups[client], self._weight(client))
            decoded.append(up)
        stacked = None
        if self.engine.settings.reduction.stacked is not None:
            lacking = self.rules.cohort - len(decoded)
            decoded += [trees.zeros_like(decoded[0])] * lacking
            mask = jnp.arange(len(decoded)) < len(ups)
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *decoded), mask
        key = keys.at(self.setting.server_key, "server", self.round)
        self.down, self.server = self._conclude(
            running_sum, stacked, self.down, self.server, self.engine.central, key
        )

    def _count(self, members: np.ndarray, answers: Answers, asked) -> Totals:
        """Enter the round into the books of bits."""
        ids = members.tolist()
        status = np.array([aggregation.status(answers, client) for client in ids])
        up_bits = down_bits = None
        if has_ragged(self.shapes.up):
            said = {client: up for client, (up, _) in answers.good.items()}
            up_bits = np.array([_ragged(said.get(client)) for client in ids])
        if has_ragged(self.shapes.message):
            told = {client: down for client, (_, down) in asked.items()}
            down_bits = np.array([_ragged(told.get(client)) for client in ids])
        return self.ledger.enter(members, status, up_bits, down_bits)

    def _measure(self) -> None:
        """Ask all clients for what they measure, and write a record."""
        self._enroll(np.arange(self.federated_data.clients))
        words = {"last": self.round == self.rounds}
        head = Message("measure", self.setting.experiment, UNKNOWN, self.round)
        asked = {}
        for client in np.flatnonzero(self.bases != UNKNOWN).tolist():
            told = self._deploy(self.down, self.requests[client], self.engine.params)
            payload = told._replace(message=told.message._replace(round=None))
            base = int(self.bases[client])
            own = head._replace(client=client, base=base, words=words)
            asked[client] = (own, payload)
        answers = self._ask(asked, partial(aggregation.measures, self.setting.metrics))
        splits = self.federated_data.splits
        measured = aggregation.table(answers.good, self.federated_data.clients, splits)
        counts = {name: split.counts for name, split in splits.items()}
        self.measured, news, self.news = [measured], self.news, News()
        self.records.append(
            Record(
                round=self.round,
                **news._asdict(),
                bits_up=int(self.ledger.up.sum()),
                bits_down=int(self.ledger.down.sum()),
                measures=spreads(measured, counts, self.setting.metrics),
            )
        )

    def _ask(self, asked, take: Callable, enough: int | None = None) -> Answers:
        answers = exchange(
            self.directory,
            asked,
            take,
            self.rules.patience,
            enough=enough,
            longest=self.rules.largest,
        )
        for what, times in answers.strays.items():
            room = what in self.strays or len(self.strays) < KINDS_OF_STRAYS
            self.strays[what if room else "others"] += times
        for kind in ("refused", "rejected"):
            for client, why in getattr(answers, kind).items():
                self.setting.note(kind, client=client, reason=why)
        for what, times in answers.strays.items():
            self.setting.note("stray", what=what, times=times)
        return answers

    def _member(self, client: int) -> Members:
        return Members(
            ids=jnp.asarray(client, jnp.int32),
            slots=jnp.asarray(client, jnp.int32),
            starts=jnp.asarray(0, jnp.int32),
            counts=jnp.asarray(self.federated_data.train.counts[client], jnp.int32),
            weights=jnp.asarray(self.setting.weights[client], float),
            present=jnp.asarray(True),
        )

    def _weight(self, client: int) -> jax.Array:
        return jnp.asarray(self.setting.weights[client : client + 1], float)


def _ragged(payload: PyTree | None) -> int:
    bits = None if payload is None else ragged_bits(payload)
    return 0 if bits is None else int(bits)

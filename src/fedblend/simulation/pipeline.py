# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of rounds and measures, in pieces that fit the device.

A block is computed in parts, where states or rows have to be brought. What the next
part needs, also that of the next block, is prepared while the device computes; and
where clients have no states, the device goes on with it while the host looks at what
was computed.
"""

import time
from concurrent.futures import Future
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend import trees
from fedblend.core import Key, PyTree
from fedblend.simulation import devices
from fedblend.simulation.cohort_loader import CohortLoader, Plan
from fedblend.simulation.devices import Worker
from fedblend.simulation.engine import Engine
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.rounds import Log
from fedblend.simulation.sampling import Cohorts

AHEAD_SECONDS = 2.0
"""The longest block after which the next one is begun before anybody asks for it."""


class BlockLog(NamedTuple):
    """A part of a block: its cohorts, [keys, rounds, ...], and what they did."""

    ids: np.ndarray
    log: Log
    rounds: int


class Part(NamedTuple):
    """Rounds up to ``after``, and the carry that they lead to."""

    after: int
    carry: Any
    entry: BlockLog
    begun: "Begun | None" = None

    @property
    def seconds(self) -> float | None:
        """How long they took, if they were begun ahead."""
        if self.begun is None:
            return None
        return self.begun.end.result() - self.begun.start.result()


class Begun(NamedTuple):
    """Rounds ``first`` to ``last`` from ``before``, begun before they are asked for.

    ``call`` ends when the device has all its work; it did that from ``start`` to
    ``end``.
    """

    before: Any
    first: int
    last: int
    call: Future[Part]
    start: Future[float]
    end: Future[float]


class Pipeline:
    """The blocks of a run, one after the other."""

    def __init__(
        self,
        engine: Engine,
        clients: CohortLoader,
        cohorts: Cohorts,
        evaluation: Evaluation,
    ):
        self._engine, self._clients, self._cohorts = engine, clients, cohorts
        self._evaluation, self._measuring = evaluation, (None, None)
        self._latest = 0.0
        self._ahead: tuple[int, int, Plan] | None = None
        self._begun: Begun | None = None
        self._calls, self._watch = Worker(), Worker()

    def advance(
        self, carry: Any, first: int, last: int, until: int
    ) -> tuple[Any, list[BlockLog], float | None]:
        """Rounds ``first`` to ``last``; ``until`` is where the next block will end.

        ``carry`` is (down, server). Also returns how long the block took, if it was
        begun ahead.
        """
        begun, parts = self._engine.programs.clock(), []
        while first < last:
            part = self._take(carry, first, last)
            part = part or self._begin(carry, self._plan_of(first, last), first, last)
            parts.append(part)
            carry, first = part.carry, part.after
            end = last if first < last else until
            self._ahead = (first, end, self._plan(first, end)) if first < end else None
        if len(parts) == 1 and first < until:
            self._go_ahead(carry, first, until)
        logs = jax.device_get([part.entry.log for part in parts])
        carry = jax.block_until_ready(carry)
        both = zip(parts, logs, strict=True)
        entries = [part.entry._replace(log=log) for part, log in both]
        seconds = parts[0].seconds if len(parts) == 1 else None
        self._latest = seconds or self._engine.programs.clock() - begun
        return carry, entries, seconds

    def _go_ahead(self, carry: Any, first: int, last: int) -> None:
        """Have the device measure what is being computed, and begin the next block.

        That must take nothing away that belongs to this block, such as states, and what
        is measured of it must not have to wait.
        """
        asked, clients = self._evaluation, self._clients
        if (
            not devices.has_accelerator()
            or (asked.metrics and not asked.goes_by_rows)
            or self._latest >= AHEAD_SECONDS
            or not clients.stay
            or jax.tree.leaves(clients.shapes.state)
        ):
            return
        if asked.metrics:
            self._measuring = carry[0], self.measure(carry[0])
        start = self._watch.submit(_time_of, (carry, self._measuring[1]))
        # In a thread: a call may last as long as the device takes for its rounds.
        plan = self._plan_of(first, last)
        call = self._calls.submit(self._begin, carry, plan, first, last)
        end = self._watch.submit(lambda: _time_of(call.result().carry))
        self._begun = Begun(carry, first, last, call, start, end)

    def measure(self, down: Any) -> PyTree:
        """What ``Evaluation.measure`` finds of all clients, in groups if need be."""
        (known, values), self._measuring = self._measuring, (None, None)
        if known is down:
            return values
        engine, clients, asked = self._engine, self._clients, self._evaluation
        if asked.goes_by_rows:
            return engine.measure(asked, down, (), (), engine.examples, asked.places)
        ids = asked.chunk_ids
        chunks = max(clients.most_to_measure(asked.splits) // asked.chunk, 1)
        size = min(chunks * asked.chunk, len(ids))
        found = []
        for first in range(0, len(ids), size):
            group = np.take(ids, range(first, first + size), mode="wrap")
            states, members, *rows = clients.load_measured(group, asked.splits)
            values = engine.measure(asked, down, states, members, *rows)
            found.append(values if size == len(ids) else jax.device_get(values))
        return trees.concatenate(found, 0 if engine.replicas is None else 1)

    def _take(self, carry: Any, first: int, last: int) -> Part | None:
        """The part that was begun ahead, if it is the one that is wanted."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        part = begun.call.result()  # nothing else may use the store meanwhile
        wanted = (begun.first, begun.last) == (first, last)
        if not wanted or begun.before[0] is not carry[0]:
            return None
        return part._replace(begun=begun)

    def _begin(self, carry: Any, plan: Plan, first: int, last: int) -> Part:
        """Have the device compute as much of these rounds as fits at once."""
        engine, clients = self._engine, self._clients
        after = min(first + clients.rounds_at_once, last)
        members, states, train = clients.load(plan)
        block = engine.block(clients.shapes, states, members, train, clients.cut)
        program, arguments = block
        bounds = np.int32(first), np.int32(after)
        found = engine.programs.call(program, (carry, *arguments, *bounds))
        carry, states, log = found
        clients.store.save(plan.ids, states)
        entry = BlockLog(clients.cut.arrange(plan.ids, 0), log, after - first)
        return Part(after, carry, entry)

    def begin_compiling(self) -> None:
        """Begin to compile the blocks, where nothing has to be brought for them."""
        clients, engine = self._clients, self._engine
        ids = (len(self._roots), clients.rounds_at_once, clients.cut.clients)
        if not clients.stay:
            return
        members = clients.plan(np.zeros(ids, int)).members
        assert members is not None
        shapes = clients.shapes
        carry = clients.stack_replicas((shapes.down, shapes.server))
        states, train = clients.store.buffer, engine.examples["train"]
        program, arguments = engine.block(shapes, states, members, train, clients.cut)
        bounds = np.int32(0), np.int32(0)
        engine.programs.begin(program, (carry, *arguments, *bounds))

    def wait(self) -> None:
        """Until what was begun ahead is computed."""
        if self._begun is not None:
            self._begun.end.result()

    def forget(self) -> None:
        """What was prepared is not wanted."""
        self._ahead = self._begun = None

    def _plan_of(self, first: int, last: int) -> Plan:
        if self._ahead is not None and self._ahead[:2] == (first, last):
            return self._ahead[2]
        return self._plan(first, last)

    def _plan(self, first: int, last: int) -> Plan:
        """Draw the cohorts of the next part, and begin to bring what they need."""
        rounds = range(first, first + self._clients.rounds_at_once)
        # Rounds beyond the last only fill the shape; the block does not reach them.
        numbers = [min(number, last - 1) for number in rounds]
        ids = [self._cohorts.draw(root, numbers) for root in self._roots]
        return self._clients.plan(np.stack(ids))

    @cached_property
    def _roots(self) -> list[Key]:
        """The keys of cohorts, on the CPU: other devices are busy when these draw."""
        roots = jax.device_put(self._engine.key, jax.local_devices(backend="cpu")[0])
        return [roots] if self._engine.keys is None else list(roots)


def _time_of(computed: PyTree) -> float:
    """When this is computed."""
    jax.block_until_ready(computed)
    return time.perf_counter()

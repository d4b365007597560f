# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of rounds and measures, in pieces that fit the device.

A block is computed in parts, where states or rows have to be brought. What the next
part needs, also that of the next block, is prepared while the device computes.
"""

from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from fedblend import trees
from fedblend.core import Key, PyTree
from fedblend.simulation.clients import Clients, Plan
from fedblend.simulation.engine import Engine
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.rounds import Log
from fedblend.simulation.sampling import Cohorts


class Entry(NamedTuple):
    """A part of a block: its cohorts, [keys, rounds, ...], and what they did."""

    ids: np.ndarray
    log: Log
    rounds: int

    def of(self, place: int, replica: int | None) -> PyTree:
        """Ids and log as a ``CommunicationLog`` enters them.

        ``place`` is that of the key, ``replica`` None where there are none.
        """
        log = self.log if replica is None else trees.take(self.log, replica)
        return trees.take((self.ids[place], *log), slice(self.rounds))


class Pipeline:
    """The blocks of a run, one after the other."""

    def __init__(self, engine: Engine, clients: Clients, cohorts: Cohorts):
        self._engine, self._clients, self._cohorts = engine, clients, cohorts
        self._ahead: tuple[int, int, Plan] | None = None

    def advance(
        self, carry: Any, first: int, last: int, until: int
    ) -> tuple[Any, list[Entry]]:
        """Rounds ``first`` to ``last``; ``until`` is where the next block will end.

        ``carry`` is (down, server).
        """
        engine, clients, entries = self._engine, self._clients, []
        while first < last:
            plan = self._planned(first, last)
            after = min(first + clients.rounds_at_once, last)
            members, states, train = clients.load(plan)
            carry, states, log = engine.block(
                clients.shapes,
                carry,
                states,
                members,
                train,
                clients.cut,
                first,
                after,
            )
            clients.store.save(plan.ids, states)
            entries.append(Entry(clients.cut.arrange(plan.ids, 0), log, after - first))
            first, end = after, last if after < last else until
            self._ahead = (first, end, self._plan(first, end)) if first < end else None
        logs = jax.device_get([entry.log for entry in entries])
        carry = jax.block_until_ready(carry)
        both = zip(entries, logs, strict=True)
        return carry, [entry._replace(log=log) for entry, log in both]

    def forget(self) -> None:
        """What was prepared is not wanted."""
        self._ahead = None

    def _planned(self, first: int, last: int) -> Plan:
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
        key = self._engine.key
        roots = key if self._engine.keys == 0 else key[None]
        return list(jax.device_put(roots, jax.local_devices(backend="cpu")[0]))


def measured_values(
    engine: Engine, clients: Clients, asked: Evaluation, down: Any
) -> PyTree:
    """What ``Evaluation.measure`` finds of all clients, group by group if need be."""
    if asked.by_rows:
        return engine.measure(asked, down, (), (), engine.examples, asked.places)
    ids = asked.padded_ids
    chunks = max(clients.measured_at_once(asked.splits) // asked.chunk, 1)
    size = min(chunks * asked.chunk, len(ids))
    found = []
    for first in range(0, len(ids), size):
        group = np.take(ids, range(first, first + size), mode="wrap")
        states, members, examples, places = clients.measured(group, asked.splits)
        values = engine.measure(asked, down, states, members, examples, places)
        found.append(values if size == len(ids) else jax.device_get(values))
    return trees.concatenate(found, 0 if engine.replicas is None else 1)

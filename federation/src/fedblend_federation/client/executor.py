# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The client's half of an algorithm on the node's own rows, compiled once.

These are the functions that the simulator maps over a cohort, for the one client of
this node: same keys, same shapes, same capacity.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from itertools import count, islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.checks import fits
from fedblend.core import Algorithm, Down, Key, PyTree, Shard, Up
from fedblend.data.federated import (
    FederatedData,
    Shards,
    rows_held_out,
)
from fedblend.metrics.metric import Metric
from fedblend.simulation import aggregators, compile, train_alone
from fedblend.simulation.evaluate import evaluate_client
from fedblend.simulation.train_alone import HELD_OUT, LocalBudget, Look
from fedblend_federation.contract import Deployment, deployment

if TYPE_CHECKING:
    from fedblend.transforms.row_noise import RowNoise


@partial(compile.jit, static=1)
def enroll(algorithm: Algorithm, params, shard, key):
    """What enrollment sends, and the state of the client."""
    return trees.strongly_typed(algorithm.enroll(params, shard, key))


@partial(compile.jit, static=1)
def ask(algorithm: Algorithm, state, shard):
    """What the client asks of a message."""
    return algorithm.wire.ask(state, shard)


@partial(compile.jit, static=1)
def update(algorithm: Algorithm, message, state, shard, key):
    """The answer of a round, and the state after it."""
    up, after = algorithm.client(message, state, shard, key)
    return up._replace(mean_gradient=None, step_sum=None), after


@partial(compile.jit, static=2)
def measure(algorithm: Algorithm, measures, deployed, state, shard, held, key):
    """The model that the client deploys, and its measures."""
    model = algorithm.personal(deployed.message, state, shard, key)
    has_shared = jax.tree.leaves(deployed.shared)
    shared = deployed.shared if has_shared else deployed.message.shared
    measured, _ = evaluate_client(algorithm, dict(measures), model, shared, held)
    return model, measured


def forget() -> None:
    """Drop everything that was compiled; what is still needed is compiled again."""
    for program in (enroll, ask, update, measure):
        program.cache_clear()  # pyright: ignore
    jax.clear_caches()


Measured = dict[str, dict[str, dict[str, float]]]
"""A measure by split, model and metric."""


class Alone(NamedTuple):
    """Training alone, the alternative to taking part."""

    algorithm: Algorithm
    metric: str
    """Chooses the number of rounds."""
    least: int
    """Rounds to try at least: those of the experiment."""
    rounds: int | None = None
    """As configured; None for the number that is best on the client's own rows."""


class ClientSetup(NamedTuple):
    """What a node computes with in one experiment."""

    client: int
    algorithm: Algorithm
    params: PyTree
    """Shapes and dtypes of the parameters."""
    root: Key
    splits: Mapping[str, Shards]
    """The client's own rows: shards of a single client each."""
    capacities: Mapping[str, int]
    """The largest number of rows of any client, by split."""
    measures: Mapping[str, Metric]
    rounds: int = 2**31 - 1
    """Those of the experiment; a request for a later one is refused."""
    perturb: Callable[[Up], Up] | None = None
    """Adds noise to an update before it leaves; a round is then computed once."""
    squared: float = inf
    """mu^2 of that noise as a Gaussian mechanism, see ``ledger``."""
    fingerprint: str = ""
    """A hash of the rows; see ``state.fingerprint``."""
    secret: bytes | None = None
    """On which batches depend besides the seed."""
    protection: str = ""
    """Names the clipping or noise; replies that are kept under another are not sent."""
    precision: str | None = None
    """"float32" or "float64"; that of the process if None."""
    central: Shard | None = None
    """Shapes and dtypes of the server's own rows, where it has some."""
    clients: int | None = None
    """How many the federation has, if that is known here."""
    alone: Alone | None = None
    hidden: "RowNoise | None" = None
    """The loss that the algorithm trains on, where noise hides rows."""


class Executor:
    """What one node computes in one experiment."""

    def __init__(self, setup: ClientSetup):
        self.setup, algorithm = setup, setup.algorithm
        if setup.clients is not None:
            fits(algorithm.needs, setup.clients)
        self.shard = self._shard("train")
        self.train_rows = setup.splits["train"].total
        key = keys.derive(setup.root, "client", 0, self.shard.id)
        self.join, self.state = jax.eval_shape(
            partial(enroll, algorithm), setup.params, self.shard, key
        )
        self.request = jax.eval_shape(algorithm.wire.ask, self.state, self.shard)

        def first_down(params, join, central, key) -> Down:
            aggregate = aggregators.finish(aggregators.empty(join), 1.0)
            return trees.strongly_typed(
                algorithm.start(params, aggregate, central, key)
            )[0]

        down = jax.eval_shape(first_down, setup.params, self.join, setup.central, key)
        self.message = jax.eval_shape(algorithm.wire.tell, down, self.request)
        self.deployment = jax.eval_shape(
            partial(deployment, algorithm), down, self.request, setup.params
        )

    def request_executor(self, name: str) -> "Executor":
        """The same, with batches that only the request of this name has.

        With the same batch in two requests, the server would see what two models, or
        two experiments, make of the same few rows.
        """
        if self.setup.secret is None:
            return self
        own, salt = copy(self), _salt(self.setup.secret, name)
        own.shard = dataclasses.replace(self.shard, salt=salt)
        return own

    def enroll(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """What the client sends at enrollment, and its state."""
        key = keys.derive(self.setup.root, "enroll", 0, self.shard.id)
        return enroll(self.setup.algorithm, params, self.shard, key)

    def ask(self, state: PyTree) -> PyTree:
        """What part of the server's message the client needs."""
        return ask(self.setup.algorithm, state, self.shard)

    def update(self, down: Down, state: PyTree) -> tuple[Up, PyTree]:
        """The client's update of a round, and its next state."""
        key = keys.derive(self.setup.root, "client", down.round, self.shard.id)
        return update(self.setup.algorithm, down, state, self.shard, key)

    def measure(self, deployed: Deployment, state: PyTree) -> tuple[PyTree, Measured]:
        """The model that the client deploys, and its measures."""
        round = deployed.message.round
        key = keys.derive(self.setup.root, "personal", round, self.shard.id)
        measures = tuple(self.setup.measures.items())
        held = {name: self._shard(name) for name in self.setup.splits}
        model, measured = measure(
            self.setup.algorithm, measures, deployed, state, self.shard, held, key
        )
        return model, jax.tree.map(float, measured)

    def train_alone(
        self, params: PyTree, look: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, dict[str, float]], LocalBudget]:
        """``{split: {metric: value}}`` of training alone, and the number of rounds.

        ``look`` is called after every round and may raise, where time is over. With a
        configured number of rounds this is the simulator's training alone; the best
        number a node can only choose on its own rows.
        """
        assert self.setup.alone is not None
        alone = self.setup.alone
        budget = (
            self._best(params, alone, look)
            if alone.rounds is None
            else LocalBudget(alone.rounds)
        )
        only = Executor(self.setup._replace(algorithm=alone.algorithm, alone=None))
        states = only._states_alone(params, look)
        number, state = next(islice(states, budget.rounds, None))
        return only._measure_alone(number, state), budget

    def _best(
        self, params: PyTree, alone: Alone, look: Callable[[], None]
    ) -> LocalBudget:
        """The best number of rounds on validation rows, or held-out training rows."""
        setup, room = self.setup, self.setup.capacities
        data = FederatedData(setup.splits["train"], setup.splits.get("validation"))
        if not data.validates:
            data = data.holding_out(HELD_OUT).select([0])
            held_out = int(rows_held_out(room["train"], HELD_OUT))
            room = {"train": room["train"] - held_out, "validation": max(held_out, 1)}
        setup = setup._replace(splits=data.splits, capacities=room)
        trial = Executor(setup._replace(algorithm=alone.algorithm, alone=None))
        least = train_alone.least_rounds(alone.least)
        looks, at, wanted = [], 0, train_alone.looks()
        for number, state in trial._states_alone(params, look):
            if number < at:
                continue
            values = trial._measure_alone(number, state)["validation"]
            score, second = (
                train_alone.score(setup.measures[name], values[name])
                if name in values
                else 0.0
                for name in (alone.metric, "loss")
            )
            looks.append(Look(number, score, second))
            at = next(wanted)
            if number and train_alone.has_ended(looks, least):
                break
        return train_alone.best_budget(looks, least, "its own rows", alone.metric)

    def _states_alone(
        self, params: PyTree, look: Callable[[], None]
    ) -> Iterator[tuple[int, PyTree]]:
        """The state after 0, 1, 2, ... rounds in which the server sends nothing."""
        _, state = self.enroll(params)
        for number in count():
            yield number, state
            _, state = jax.block_until_ready(self.update(_empty_down(number), state))
            look()

    def _measure_alone(self, number: int, state: PyTree) -> dict[str, dict[str, float]]:
        _, measured = self.measure(Deployment(_empty_down(number)), state)
        return {split: models["personal"] for split, models in measured.items()}

    def _shard(self, split: str) -> Shard:
        rows = self.setup.splits[split]
        start, count, id = (
            jnp.asarray(number, jnp.int32)
            for number in (0, rows.total, self.setup.client)
        )
        capacity = self.setup.capacities[split]
        # Room for as many rows as any client has: the compiled functions are the same
        # for all clients, and a window of no rows at all could not be read.
        examples = jax.tree.map(
            lambda leaf: jnp.pad(
                leaf, [(0, capacity - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)]
            ),
            rows.examples,
        )
        salt = _salt(self.setup.secret, "")
        return Shard(examples, start, count, id, capacity, salt)


def _salt(secret: bytes | None, request: str) -> jax.Array | None:
    """The salt of a shard; nobody can tell those of two requests from random ones."""
    if secret is None:
        return None
    digest = hashlib.sha256(secret + request.encode()).digest()
    return jnp.asarray(np.frombuffer(digest[:8], np.uint32))


def _empty_down(round: int) -> Down:
    return Down(None, jnp.asarray(round, jnp.int32))

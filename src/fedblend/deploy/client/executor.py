# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A client's half of an algorithm on its own data, compiled once.

The same functions that the simulator maps over a cohort, for the one client that lives
here: same keys, same shapes, same capacity.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.checks import fits
from fedblend.core import Algorithm, Down, Key, PyTree, Shard, Up
from fedblend.data.federated import FederatedData, Shards, rows_held_out
from fedblend.metrics import Metric
from fedblend.simulation import aggregators, early_stopping
from fedblend.simulation.early_stopping import HELD_OUT, Budget, Look
from fedblend.simulation.evaluate import evaluate_client


class Alone(NamedTuple):
    """Training alone, to compare with."""

    algorithm: Algorithm
    metric: str
    """Which decides how long."""
    least: int
    """Rounds to try at least: those of the experiment."""
    rounds: int | None = None
    """As many were asked for; None for the best on the client's own rows."""


class Own(NamedTuple):
    """What a node computes with: its client id, the method, its rows."""

    client: int
    algorithm: Algorithm
    params: PyTree
    """Shapes and dtypes of the parameters."""
    root: Key
    splits: Mapping[str, Shards]
    """The client's own rows: shards of a single client each."""
    capacities: Mapping[str, int]
    """The largest counts in the federation, by split."""
    measures: Mapping[str, Metric]
    rounds: int = 2**31 - 1
    """Those of the experiment; a later one is refused."""
    leave: Callable[[Up], Up] | None = None
    """What is done to an answer before it leaves, if that comes to something else every
    time: a round is then answered once."""
    manner: str = ""
    """What else was agreed on how answers leave; kept ones of another are not told."""
    precision: str | None = None
    """"float32" or "float64"; that of the process if None."""
    central: Shard | None = None
    """Shapes and dtypes of the server's own rows, where it has some."""
    clients: int | None = None
    """How many there are in the federation, if it is known here."""
    alone: Alone | None = None


class Deployment(NamedTuple):
    """What a client is told to make the model that it uses."""

    message: Down
    shared: PyTree = ()
    """The shared model, where the message holds it in another form."""


def first_word(algorithm: Algorithm, params, join, central, key) -> Down:
    """The server's first word, from what enrollment says; for its shapes."""
    aggregate = aggregators.finish(aggregators.empty(join), 1.0)
    return trees.strongly_typed(algorithm.start(params, aggregate, central, key))[0]


def deployment(algorithm: Algorithm, down: Down, request, params) -> Deployment:
    """What is told to a client with this request."""
    message = down if algorithm.needs.whole else algorithm.tell(down, request)
    forms = (jax.tree.structure(params), jax.tree.structure(None))
    plain = jax.tree.structure(message.shared) in forms
    return Deployment(message, () if plain else down.shared)


class Executor:
    """What one node computes in one experiment."""

    def __init__(self, own: Own):
        self.own, algorithm = own, own.algorithm
        if own.clients is not None:
            fits(algorithm.needs, own.clients)
        self.shard = self._shard("train")
        key = keys.at(own.root, "client", 0, self.shard.id)
        self.join, self.state = jax.eval_shape(
            partial(_enroll, algorithm), own.params, self.shard, key
        )
        self.request = jax.eval_shape(algorithm.ask, self.state, self.shard)
        down = jax.eval_shape(
            partial(first_word, algorithm), own.params, self.join, own.central, key
        )
        self.message = jax.eval_shape(algorithm.tell, down, self.request)
        self.deployed = jax.eval_shape(
            partial(deployment, algorithm), down, self.request, own.params
        )

    def enroll(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """What the client says first, and its state."""
        key = keys.at(self.own.root, "enroll", 0, self.shard.id)
        return _enroll(self.own.algorithm, params, self.shard, key)

    def ask(self, state: PyTree) -> PyTree:
        """What the client needs of a message."""
        return _ask(self.own.algorithm, state, self.shard)

    def client(self, down: Down, state: PyTree) -> tuple[Up, PyTree]:
        """A round."""
        key = keys.at(self.own.root, "client", down.round, self.shard.id)
        return _client(self.own.algorithm, down, state, self.shard, key)

    def measure(self, told: Deployment, state: PyTree) -> tuple[PyTree, dict]:
        """The client's model, and ``{split: {model: {metric: value}}}``."""
        key = keys.at(self.own.root, "personal", told.message.round, self.shard.id)
        measures = tuple(self.own.measures.items())
        held = {name: self._shard(name) for name in self.own.splits}
        algorithm = self.own.algorithm
        model, seen = _look(algorithm, measures, told, state, self.shard, held, key)
        return model, jax.tree.map(float, seen)

    def alone(self, params: PyTree) -> tuple[dict[str, dict[str, float]], Budget]:
        """``{split: {metric: value}}`` of training alone, and how long it took.

        With a number of rounds that was asked for it is the simulator's training alone;
        the best number a node can only choose on rows of its own.
        """
        assert self.own.alone is not None
        of = self.own.alone
        known = Budget(of.rounds) if of.rounds is not None else self._best(params, of)
        only = Executor(self.own._replace(algorithm=of.algorithm, alone=None))
        number, state = next(islice(only._silently(params), known.rounds, None))
        return only._seen_alone(number, state), known

    def _best(self, params: PyTree, of: Alone) -> Budget:
        """The best number of rounds on validation rows, or held-out training rows."""
        own, room = self.own, self.own.capacities
        held = FederatedData(own.splits["train"], own.splits.get("validation"))
        if not held.validates:
            held = held.holding_out(HELD_OUT).select([0])
            apart = rows_held_out(room["train"], HELD_OUT)
            room = {"train": room["train"] - apart, "validation": max(apart, 1)}
        own = own._replace(splits=held.splits, capacities=room)
        trial = Executor(own._replace(algorithm=of.algorithm, alone=None))
        seen, wanted, least = (
            [],
            early_stopping.looks(),
            early_stopping.least_rounds(of.least),
        )
        at = 0
        for number, state in trial._silently(params):
            if number < at:
                continue
            values = trial._seen_alone(number, state)["validation"]
            second = 0.0
            if "loss" in values:
                second = early_stopping.score(own.measures["loss"], values["loss"])
            score = early_stopping.score(own.measures[of.metric], values[of.metric])
            seen.append(Look(number, score, second))
            at = next(wanted)
            if number and early_stopping.over(seen, least):
                break
        return early_stopping.chosen(seen, least, "its own rows", of.metric)

    def _silently(self, params: PyTree) -> Iterator[tuple[int, PyTree]]:
        """The state after 0, 1, 2, ... rounds in which nothing is told."""
        _, state = self.enroll(params)
        for number in count():
            yield number, state
            _, state = self.client(_nothing(number), state)

    def _seen_alone(self, number: int, state: PyTree) -> dict[str, dict[str, float]]:
        _, seen = self.measure(Deployment(_nothing(number)), state)
        return {split: models["personal"] for split, models in seen.items()}

    def counts(self) -> dict[str, int]:
        """The client's rows in each split."""
        return {name: split.total for name, split in self.own.splits.items()}

    def _shard(self, split: str) -> Shard:
        rows = self.own.splits[split]
        start, count, id = (
            jnp.asarray(number, jnp.int32)
            for number in (0, rows.total, self.own.client)
        )
        capacity = self.own.capacities[split]
        # Room for as many rows as any client has: the compiled functions are the same
        # for all clients, and a window of no rows at all could not be read.
        examples = jax.tree.map(
            lambda leaf: jnp.pad(
                leaf, [(0, capacity - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)]
            ),
            rows.examples,
        )
        return Shard(examples, start, count, id, capacity)


def _nothing(round: int) -> Down:
    return Down(None, jnp.asarray(round, jnp.int32))


@partial(jax.jit, static_argnums=0)
def _enroll(algorithm: Algorithm, params, shard, key):
    return trees.strongly_typed(algorithm.enroll(params, shard, key))


@partial(jax.jit, static_argnums=0)
def _ask(algorithm: Algorithm, state, shard):
    return algorithm.ask(state, shard)


@partial(jax.jit, static_argnums=0)
def _client(algorithm: Algorithm, message, state, shard, key):
    up, after = algorithm.client(message, state, shard, key)
    return up._replace(mean_gradient=None, step_sum=None), after


@partial(jax.jit, static_argnums=(0, 1))
def _look(algorithm: Algorithm, measures, told: Deployment, state, shard, held, key):
    model = algorithm.personal(told.message, state, shard, key)
    shared = told.shared if jax.tree.leaves(told.shared) else told.message.shared
    found = evaluate_client(algorithm, dict(measures), model, shared, held)
    seen = {
        split: {name: numbers for name, (numbers, _) in models.items()}
        for split, models in found.items()
    }
    return model, seen

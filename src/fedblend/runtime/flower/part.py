# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A client's half of an algorithm on its own data, compiled once.

The same functions that the simulator maps over a cohort, for the one client that lives
here: same keys, same shapes, same capacity.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import fits
from fedblend.core import Algorithm, Down, Key, PyTree, Shard, Up, shared_model
from fedblend.data.batches import everything
from fedblend.data.federation import Shards
from fedblend.runtime import reduce
from fedblend.runtime.visits import strong


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
    measures: Mapping[str, Callable]
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
    alone: tuple[Algorithm, int] | None = None
    """Training alone, and for how many rounds, to compare with."""


class Deployment(NamedTuple):
    """What a client is told to make the model that it uses."""

    message: Down
    shared: PyTree = ()
    """The shared model, where the message holds it in another form."""


def first_word(algorithm: Algorithm, params, hello, central, key) -> Down:
    """The server's first word, from what enrolment says; for its shapes."""
    heard = reduce.hear(reduce.nothing_heard(hello), 1.0)
    return strong(algorithm.start(params, heard, central, key))[0]


def deployment(algorithm: Algorithm, down: Down, request, params) -> Deployment:
    """What is told to a client with this request."""
    message = down if algorithm.needs.whole else algorithm.tell(down, request)
    forms = (jax.tree.structure(params), jax.tree.structure(None))
    plain = jax.tree.structure(message.shared) in forms
    return Deployment(message, () if plain else down.shared)


class Part:
    """What one node computes in one experiment."""

    def __init__(self, own: Own):
        self.own, algorithm = own, own.algorithm
        if own.clients is not None:
            fits(algorithm.needs, own.clients)
        self.shard = self._shard("train")
        key = keys.at(own.root, "client", 0, self.shard.id)
        self.hello, self.state = jax.eval_shape(
            partial(_enroll, algorithm), own.params, self.shard, key
        )
        self.request = jax.eval_shape(algorithm.ask, self.state, self.shard)
        down = jax.eval_shape(
            partial(first_word, algorithm), own.params, self.hello, own.central, key
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

    def client(self, message: Down, state: PyTree) -> tuple[Up, PyTree]:
        """A round."""
        key = keys.at(self.own.root, "client", message.round, self.shard.id)
        return _client(self.own.algorithm, message, state, self.shard, key)

    def measure(self, told: Deployment, state: PyTree) -> tuple[PyTree, dict]:
        """The client's model, and ``{split: {model: {metric: value}}}``."""
        key = keys.at(self.own.root, "personal", told.message.round, self.shard.id)
        measures = tuple(self.own.measures.items())
        held = {name: self._shard(name) for name in self.own.splits}
        algorithm = self.own.algorithm
        model, seen = _look(algorithm, measures, told, state, self.shard, held, key)
        return model, jax.tree.map(float, seen)

    def alone(self, params: PyTree) -> dict[str, dict[str, float]]:
        """``{split: {metric: value}}`` of training alone, as in the simulator."""
        assert self.own.alone is not None
        algorithm, rounds = self.own.alone
        only = Part(self.own._replace(algorithm=algorithm, alone=None))
        _, state = only.enroll(params)
        nothing = Down(None, jnp.zeros((), jnp.int32))
        for number in range(rounds):
            told = nothing._replace(round=jnp.asarray(number, jnp.int32))
            _, state = only.client(told, state)
        end = nothing._replace(round=jnp.asarray(rounds, jnp.int32))
        _, seen = only.measure(Deployment(end), state)
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


@partial(jax.jit, static_argnums=0)
def _enroll(algorithm: Algorithm, params, shard, key):
    return strong(algorithm.enroll(params, shard, key))


@partial(jax.jit, static_argnums=0)
def _ask(algorithm: Algorithm, state, shard):
    return algorithm.ask(state, shard)


@partial(jax.jit, static_argnums=0)
def _client(algorithm: Algorithm, message, state, shard, key):
    up, after = algorithm.client(message, state, shard, key)
    return up._replace(slope=None, stretch=None), after


@partial(jax.jit, static_argnums=(0, 1))
def _look(algorithm: Algorithm, measures, told: Deployment, state, shard, held, key):
    models = {"personal": algorithm.personal(told.message, state, shard, key)}
    shared = told.shared if jax.tree.leaves(told.shared) else told.message.shared
    one_for_all = algorithm.personal is shared_model
    if jax.tree.leaves(shared) and not one_for_all:
        models["shared"] = shared
    seen = {
        split: {
            model: {name: see(params, everything(rows)) for name, see in measures}
            for model, params in models.items()
        }
        for split, rows in held.items()
    }
    if one_for_all:
        seen = {split: {**by, "shared": by["personal"]} for split, by in seen.items()}
    return models["personal"], seen

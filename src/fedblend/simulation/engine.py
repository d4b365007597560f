# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compiling ``rounds`` and ``evaluate`` for all replicas, and the clients they run on.

With replicas every array of down, server and measures has them as first axis and client
states as second; where all replicas share a key, the cohorts and batches they share are
read only once. Replicas with splits of their own read the same flat arrays, where these
lie one after another: only the places at which rows start have an axis of replicas.

Clients are enrolled when they are first needed, all at once where the server waits for
what enrollment sends, or where states live on the device.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Down, Info, Key, PyTree, Shard
from fedblend.data.federated import Shards
from fedblend.simulation import evaluate, rounds
from fedblend.simulation.aggregators import RunningSum, empty, finish
from fedblend.simulation.client_store import open_store
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.rounds import Members, Settings, Shapes
from fedblend.simulation.sampling import Weights

ENROLL_AT_ONCE = 1024
"""Clients enrolled in one call; bounds the memory it takes."""


class Engine:
    """The compiled parts of one simulation.

    ``sweep``, ``keys``, ``inits`` and ``places`` are the axes of replicas that the
    swept values, the keys, the initial parameters and the starts of rows have: 0, or
    None where all replicas share them.
    """

    def __init__(
        self,
        settings: Settings,
        key: Key,
        over: PyTree | None,
        params: PyTree,
        own_params: bool,
        examples: dict[str, PyTree],
        central: Shard | None,
        own_rows: bool = False,
        replicas: int | None = None,
    ):
        self.settings, self.key, self.over, self.params = settings, key, over, params
        self.examples, self.central, self.replicas = examples, central, replicas
        self.sweep = 0 if over is not None else None
        self.keys = 0 if key.ndim else None
        self.inits = 0 if own_params else None
        self.places = 0 if own_rows else None
        self.placed = Members(None, None, self.places, None, None, None)  # type: ignore
        self.compile_seconds = 0.0
        self.compiled: dict[str, Any] = {}

    def shapes(self, member: Members) -> Shapes:
        """What server and clients of one replica exchange; nothing is computed."""
        settings = self.settings

        def one_round(hyper, root, params, examples, member, central):
            algorithm = settings.build(hyper)
            group = jax.tree.map(lambda leaf: leaf[None], member)
            join, states = rounds.enroll(settings, hyper, root, params, examples, group)
            joined, state = finish(join, 1.0), trees.take(states, 0)
            down, server = rounds.start(settings, hyper, root, params, joined, central)
            message, up, changed = rounds.exchange(
                settings, algorithm, root, down, examples, state, member
            )
            shard = rounds.shard_of(settings, examples, member)
            decoded = algorithm.decode(up)
            aggregate = finish(empty(decoded), 1.0)
            _, after = algorithm.server(aggregate, down, server, central, root)
            shapes = Shapes(
                params=params,
                join=joined.mean,
                state=state,
                down=down,
                server=server,
                message=message,
                up=up,
                decoded=decoded,
                last=evaluate.message_to_deploy(algorithm, down, state, shard),
            )
            return shapes, changed, after

        hyper = None if self.sweep is None else trees.take(self.over, 0)
        root = self.key if self.keys is None else self.key[0]
        params = self.params if self.inits is None else trees.take(self.params, 0)
        shapes, client, server = jax.eval_shape(
            one_round, hyper, root, params, self.examples["train"], member, self.central
        )
        _same("client", shapes.state, client)
        _same("server", shapes.server, server)
        return shapes

    def enroll(self, members: Members) -> tuple[RunningSum, PyTree]:
        """The sum of what a group of clients sends on joining, and their states."""
        arguments = (self.params, self.examples["train"], members)
        axes = (self.inits, None, self.placed)
        return self._call("enroll", rounds.enroll, arguments, axes, (0, 1))

    def start(self, joined: RunningSum) -> tuple[PyTree, PyTree]:
        """The server's first message, and its state."""

        def begin(settings, hyper, root, params, joined, central):
            aggregate = finish(joined, settings.everyone)
            return rounds.start(settings, hyper, root, params, aggregate, central)

        arguments = (self.params, joined, self.central)
        return self._call("start", begin, arguments, (self.inits, 0, None), 0)

    def block(
        self,
        shapes: Shapes,
        carry: tuple[Down, PyTree],
        states: PyTree,
        plan: Members,
        first: int,
        last: int,
    ) -> tuple[tuple[Down, PyTree], PyTree, rounds.Log]:
        """Some rounds; the states are given up to the call."""
        examples = self.examples["train"]
        arguments = (carry, states, examples, self.central, plan, first, last)
        axes = (0, 1, None, None, self.keys, None, None)
        block = partial(rounds.block, shapes)
        return self._call("block", block, arguments, axes, (0, 1, 0), donate=(3,))

    def measure(
        self, asked: Evaluation, down: Down, states: PyTree, members: Members
    ) -> tuple[PyTree, PyTree]:
        """The metrics of clients, and what each row contributes."""
        places = asked.places
        arguments = (down, states, self.examples, members, places)
        placed = dict.fromkeys(places, (self.places, None))
        axes = (0, 1, None, self.placed, placed)
        return self._call("measure", asked.measure, arguments, axes, 0)

    def personal(self, down: Down, state: PyTree, shard: Shard) -> PyTree:
        """The model of one client."""
        placed: Any = Shard(None, self.places, None, None, shard.capacity)  # type: ignore
        arguments = (down, state, shard)
        return self._call("personal", evaluate.personal, arguments, (0, 0, placed), 0)

    def info(self, states: PyTree) -> Info:
        """The diagnostics of clients whose states are stacked."""
        if not jax.tree.leaves(states):
            return {}

        def one(hyper, state):
            return self.settings.build(hyper).info(state)

        each = jax.vmap(one, in_axes=(None, 0))
        if self.replicas is not None:
            each = jax.vmap(each, in_axes=(self.sweep, 1), out_axes=1)
        return each(self.over, states)

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        axes: Sequence[Any],
        out_axes: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """``function(settings, hyper, key, *arguments)``, compiled when first called.

        ``axes`` and ``out_axes`` are the axes of replicas.
        """
        arguments = (self.over, self.key, *arguments)
        if name not in self.compiled:
            begun = time.perf_counter()
            function = partial(function, self.settings)
            if self.replicas is not None:
                function = jax.vmap(function, (self.sweep, self.keys, *axes), out_axes)
            jitted = jax.jit(function, donate_argnums=donate)
            self.compiled[name] = jitted.lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - begun
        return self.compiled[name](*arguments)


def _same(function: str, before: PyTree, after: PyTree) -> None:
    """Refuse an algorithm whose state changes its structure, shapes or dtypes."""
    before, after = (
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
        for tree in (before, after)
    )
    if before != after:
        raise TypeError(f"{function}: the state changes from {before} to {after}")


class Clients:
    """Rows, weights and states of all clients.

    Args:
        engine: the compiled functions.
        train: the clients' training rows.
        weights: the clients' weights.
        per_block: clients of a block of rounds, in one replica.
        store: the kind of store for states.
        folder: where a store on disk has its files.
    """

    def __init__(
        self,
        engine: Engine,
        train: Shards,
        weights: Weights,
        *,
        per_block: int,
        store: str,
        folder: Path | None,
    ):
        self.train = train
        self._engine, self._weights, self._replicas = engine, weights, engine.replicas
        self.number = len(train.counts)
        first = self.members(np.zeros(1, int))
        first = first._replace(starts=first.starts.reshape(-1))
        self.shapes = engine.shapes(trees.take(first, 0))
        template = self.with_replicas(self.shapes.state)
        self.store = open_store(store, template, self.number, folder)
        self._room = min(ENROLL_AT_ONCE, self.number)
        if not self.store.eager and not self.joins:
            self._room = min(self._room, per_block * (engine.replicas or 1))

    @property
    def joins(self) -> bool:
        """Whether enrollment sends anything to the server."""
        return bool(jax.tree.leaves(self.shapes.join))

    def with_replicas(self, shapes: PyTree) -> PyTree:
        """Shapes of one replica as they are in this run."""
        ahead = () if self._replicas is None else (self._replicas,)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(ahead + leaf.shape, leaf.dtype), shapes
        )

    def members(
        self,
        ids: np.ndarray,
        slots: np.ndarray | None = None,
        present: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ) -> Members:
        """Arrays over these clients, as the compiled functions take them."""
        starts = self.train.starts
        if starts.ndim == 2 and ids.ndim == 3:  # a replica of its own for each split
            starts = starts[np.arange(len(starts))[:, None, None], ids]
        else:
            starts = starts[..., ids]
        present = np.ones(ids.shape, bool) if present is None else present
        weights = self._weights.rounds if weights is None else weights
        return Members(
            ids=jnp.asarray(ids, jnp.int32),
            slots=jnp.asarray(ids if slots is None else slots, jnp.int32),
            starts=jnp.asarray(starts, jnp.int32),
            counts=jnp.asarray(self.train.counts[ids], jnp.int32),
            weights=jnp.asarray(weights[ids] * present, float),
            present=jnp.asarray(present),
        )

    def enroll_first(self) -> RunningSum:
        """Enroll whom the server waits for; the sum of what they send."""
        everybody = np.arange(self.number)
        joined = self.enroll(everybody) if self.joins or self.store.eager else None
        if joined is not None and self.joins:
            return joined
        nothing = empty(self.shapes.join)
        if self._replicas is None:
            return nothing
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (self._replicas, *leaf.shape)), nothing
        )

    def enroll(self, ids: np.ndarray) -> RunningSum | None:
        """Enroll those of these clients who are not; the sum of what they send."""
        if not jax.tree.leaves((self.shapes.join, self.shapes.state)):
            return None
        ids = np.unique(ids)
        ids, room = ids[~self.store.known[ids]], self._room
        total = None
        for first in range(0, len(ids), room):
            group = ids[first : first + room]
            padded = np.concatenate([group, np.full(room - len(group), group[0])])
            present = np.arange(room) < len(group)
            joining = self.members(padded, None, present, self._weights.enrollment)
            part, states = self._engine.enroll(joining)
            # Sliced on the host: on the device every new length would be compiled.
            rows = trees.take(jax.device_get(states), slice(len(group)))
            self.store.write(group, rows)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    def states(self, ids: np.ndarray) -> PyTree:
        """What these clients remember, stacked."""
        self.enroll(ids)
        return self.store.gather(ids)

    def load(self, ids: np.ndarray, chunk: int) -> tuple[Members, PyTree]:
        """Members and states of a block's cohorts, which fill whole chunks."""
        self.enroll(ids)
        states, slots = self.store.load(ids, min(self.number, ids.size))
        gap = [(0, 0), (0, 0), (0, -ids.shape[-1] % chunk)]
        present = np.pad(np.ones(ids.shape, bool), gap)
        slots = np.pad(slots, gap, constant_values=self.number)
        return self.members(np.pad(ids, gap), slots, present), states

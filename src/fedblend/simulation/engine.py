# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compiling ``rounds`` and ``evaluate``, and mapping them over replicas.

With replicas every array of down, server and measures has them as first axis and client
states as second; where all replicas share a key, the cohorts and batches they share are
read only once. Replicas with splits of their own read the same flat arrays, where these
lie one after another: only the places at which rows start have an axis of replicas.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fedblend import trees
from fedblend.core import Down, Info, Key, PyTree, Shard
from fedblend.simulation import evaluate, rounds
from fedblend.simulation.aggregators import RunningSum, empty, finish
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.rounds import Members, Settings, Shapes


class Engine:
    """The compiled parts of one simulation."""

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
    ):
        self.settings, self.key, self.over, self.params = settings, key, over, params
        self.examples, self.central = examples, central
        self.sweep = 0 if over is not None else None
        self.keys = 0 if key.ndim else None
        self.inits = 0 if own_params else None
        self.places = 0 if own_rows else None
        self.placed = Members(None, None, self.places, None, None, None)  # type: ignore
        self.compile_seconds = 0.0
        self._compiled: dict[str, Any] = {}

    def shapes(self, member: Members) -> Shapes:
        """What server and clients of one replica exchange; nothing is computed."""
        settings, train = self.settings, self.examples["train"]
        hyper = None if self.sweep is None else trees.take(self.over, 0)
        root = self.key if self.keys is None else self.key[0]
        params = self.params if self.inits is None else trees.take(self.params, 0)
        group = jax.tree.map(lambda leaf: leaf[None], member)
        running_sum, states = jax.eval_shape(
            partial(rounds.enroll, settings), hyper, root, params, train, group
        )
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states
        )
        join = jax.eval_shape(finish, running_sum, 1.0)
        down, server = jax.eval_shape(
            partial(rounds.start, settings),
            hyper,
            root,
            params,
            join,
            self.central,
        )

        def talk(hyper, root, down, examples, state, member):
            algorithm = settings.build(hyper)
            said = rounds.exchange(
                settings, algorithm, root, down, examples, state, member
            )
            shard = rounds.shard_of(settings, examples, member)
            last = evaluate.message_to_deploy(algorithm, down, state, shard)
            return said, algorithm.decode(said.up), last

        said, decoded, last = jax.eval_shape(
            talk, hyper, root, down, train, state, member
        )
        _same("client", "state", state, said.state)

        def act(hyper, root, aggregate, down, server, central):
            return settings.build(hyper).server(aggregate, down, server, central, root)

        aggregate = jax.eval_shape(lambda up: finish(empty(up), 1.0), decoded)
        _, after = jax.eval_shape(
            act, hyper, root, aggregate, down, server, self.central
        )
        _same("server", "state", server, after)
        return Shapes(
            params=params,
            join=join.mean,
            state=state,
            down=down,
            server=server,
            message=said.message,
            up=said.up,
            decoded=decoded,
            last=last,
        )

    def enroll(self, members: Members) -> tuple[RunningSum, PyTree]:
        """The sum of what a group of clients says on joining, and their states."""
        return self._call(
            "enroll",
            partial(rounds.enroll, self.settings),
            (self.sweep, self.keys, self.inits, None, self.placed),
            (0, 1),
            (self.over, self.key, self.params, self.examples["train"], members),
        )

    def start(self, running_sum: RunningSum) -> tuple[PyTree, PyTree]:
        """The server's first message, and its state."""

        def begin(hyper, root, params, running_sum, central):
            aggregate = finish(running_sum, self.settings.everyone)
            return rounds.start(self.settings, hyper, root, params, aggregate, central)

        return self._call(
            "start",
            begin,
            (self.sweep, self.keys, self.inits, 0, None),
            0,
            (self.over, self.key, self.params, running_sum, self.central),
        )

    def block(self, shapes: Shapes, carry, states, plan: Members, first, last):
        """Some rounds; the states are given up to the call."""
        return self._call(
            "block",
            partial(rounds.block, self.settings, shapes),
            (self.sweep, self.keys, 0, 1, None, None, self.keys, None, None),
            (0, 1, 0),
            (
                self.over,
                self.key,
                carry,
                states,
                self.examples["train"],
                self.central,
                plan,
                first,
                last,
            ),
            donate=(3,),
        )

    def measure(
        self, asked: Evaluation, down: Down, states: PyTree, members: Members
    ) -> tuple[PyTree, PyTree]:
        """The metrics of clients, and what each row contributes."""
        places = asked.places
        return self._call(
            "measure",
            partial(asked.measure, self.settings),
            (
                self.sweep,
                self.keys,
                0,
                1,
                None,
                self.placed,
                dict.fromkeys(places, (self.places, None)),
            ),
            0,
            (self.over, self.key, down, states, self.examples, members, places),
        )

    def personal(self, down, state, shard: Shard) -> PyTree:
        """The model of one client."""
        placed: Any = Shard(None, self.places, None, None, shard.capacity)  # type: ignore
        return self._call(
            "personal",
            partial(evaluate.personal, self.settings),
            (self.sweep, self.keys, 0, 0, placed),
            0,
            (self.over, self.key, down, state, shard),
        )

    def info(self, states: PyTree) -> Info:
        """The diagnostics of clients whose states are stacked."""
        if not jax.tree.leaves(states):
            return {}

        def one(hyper, state):
            return self.settings.build(hyper).info(state)

        each = jax.vmap(one, in_axes=(None, 0))
        if self.sweep is not None or self.keys is not None:
            each = jax.vmap(each, in_axes=(self.sweep, 1), out_axes=1)
        return each(self.over, states)

    def _call(
        self, name: str, function: Callable, in_axes, out_axes, arguments, donate=()
    ):
        if name not in self._compiled:
            begun = time.perf_counter()
            if self.sweep is not None or self.keys is not None:
                function = jax.vmap(function, in_axes=in_axes, out_axes=out_axes)
            jitted = jax.jit(function, donate_argnums=donate)
            self._compiled[name] = jitted.lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - begun
        return self._compiled[name](*arguments)


def _same(function: str, what: str, before: PyTree, after: PyTree) -> None:
    """Refuse an algorithm whose state changes its structure, shapes or dtypes."""
    described = [
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
        for tree in (before, after)
    ]
    if described[0] != described[1]:
        raise TypeError(
            f"{function}: the {what} changes from {described[0]} to {described[1]}"
        )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compiling ``rounds`` and ``evaluate`` for all replicas.

Replicas are the first axis of every array of down, server and measures, and the second
of client states. Where all replicas share a key, they share cohorts and batches, which
are read only once. Replicas with splits of their own read the same flat arrays, in
which the splits lie one after another: only the places at which rows start have an axis
of replicas.

Enrollment and rounds are spread over a mesh of devices (``devices``).
"""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fedblend import trees
from fedblend.core import Algorithm, Down, Info, Key, PyTree, Sender, Shard
from fedblend.errors import SettingError
from fedblend.simulation import devices, evaluate, rounds
from fedblend.simulation.aggregators import RunningSum, empty, finish
from fedblend.simulation.compile import ClientAxes, Programs, ReplicaProgram, lower
from fedblend.simulation.devices import Cut, Worker
from fedblend.simulation.evaluate import Evaluation
from fedblend.simulation.rounds import Members, Settings, Shapes
from fedblend.simulation.stores.device_store import Slots


class Initial:
    """The initial parameters: given, or drawn by a program that compiles meanwhile.

    ``shapes`` are there at once. With ``each`` every one of several keys has its own.
    """

    def __init__(self, given: PyTree | Callable[[Key], PyTree], key: Key, each: bool):
        self._key, self.each = key, each
        if not callable(given):
            self.params = trees.strongly_typed(given)
            self.shapes = jax.eval_shape(lambda: self.params)
            return

        def draw(key):
            return trees.strongly_typed(given(key))

        traced = jax.jit(jax.vmap(draw) if each else draw).trace(key)
        self.shapes = trees.shapes(traced.out_info)
        self._compiling = Worker().submit(lower(traced, (key,)).compile)

    @cached_property
    def params(self) -> PyTree:
        """The parameters, on the first device."""
        return self._compiling.result()(self._key)


class Engine:
    """The arguments of one simulation that never change, and its programs.

    ``sweep``, ``keys``, ``inits`` and ``places`` are the axes of replicas that the
    swept values, the keys, the initial parameters and the starts of rows have: 0, or
    None where all replicas share them. Without a mesh there is one device. Arrays
    outside of spread programs, but for the states of a block, lie on the first device.
    """

    def __init__(
        self,
        settings: Settings,
        key: Key,
        over: PyTree | None,
        initial: Initial,
        examples: dict[str, PyTree],
        central: Shard | None,
        own_rows: bool,
        replicas: int | None,
        rounds: int,
        mesh: Mesh | None = None,
    ):
        self.mesh = devices.mesh_of(jax.local_devices()[:1]) if mesh is None else mesh
        width = self.mesh.shape[devices.CLIENTS]
        self.settings = settings._replace(width=width)
        self.key, self.over, self.initial = key, over, initial
        self.examples, self.central, self.replicas = examples, central, replicas
        self.sweep = 0 if over is not None else None
        self.keys = 0 if key.ndim else None
        self.inits = 0 if initial.each else None
        self.places = 0 if own_rows else None
        self.placed = Members(None, None, self.places, None, None, None)  # type: ignore
        self.rounds = rounds
        self.programs = Programs(
            self.settings,
            (over, key),
            (self.sweep, self.keys),
            replicas,
            self.mesh,
            rounds,
            self._constants,
        )
        lie = devices.sharding(self.mesh, None if replicas is None else 1, 0)
        self.slots = Slots(width, lie)

    def _constants(self) -> list[PyTree]:
        drawn = vars(self.initial).get("params")
        return [drawn, self.central, *self.examples.values()]

    def select_replicas(self, places: slice | int) -> "Engine":
        """The engine of some replicas, or without replicas that of a single one.

        What it compiles serves all engines for as many replicas of this one.
        """

        def own(tree: PyTree, axis: int | None) -> PyTree:
            return tree if axis is None else trees.take(tree, places)

        several = isinstance(places, slice)
        key = own(self.key, self.keys)
        params = own(self.initial.params, self.inits)
        found = Engine(
            self.settings,
            key=key,
            over=own(self.over, self.sweep),
            initial=Initial(params, key, each=several and self.inits == 0),
            examples=self.examples,
            central=self.central,
            own_rows=several and self.places == 0,
            replicas=len(range(self.replicas or 1)[places]) if several else None,
            rounds=self.rounds,
        )
        shared = self.programs.compiled
        name = f"of {found.replicas} replicas"
        found.programs.compiled = shared.setdefault(name, {})
        return found

    def _turns(self, cut: Cut, together: bool = False) -> np.ndarray | None:
        """The chunks of each group of a device; all devices take as many ``together``.

        They must where states move between them, whatever chunks of padding cost.
        """
        if cut.groups == 1:
            return None
        if not together:
            return cut.turns
        width = self.settings.width
        return np.tile(cut.turns.reshape(width, -1).max(axis=0), width)

    def shapes(self, member: Members) -> Shapes:
        """What server and clients of one replica exchange; nothing is computed."""
        settings = self.settings._replace(width=1)

        def one_round(hyper, root, params, examples, member, central):
            algorithm = settings.build(hyper)
            group = jax.tree.map(lambda leaf: leaf[None, None, None], member)
            join, (states, _) = rounds.enroll(
                settings, hyper, root, params, examples, group, None
            )
            joined, state = finish(join, 1.0), trees.take(states, 0)
            down, server = rounds.start(settings, hyper, root, params, joined, central)
            message, up, changed = rounds.exchange(
                settings, algorithm, root, down, examples, state, member
            )
            shard = rounds.shard_of(settings, examples, member)
            decoded = algorithm.wire.decode(up, Sender(member.ids, root, down))
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
        params = self.initial.shapes
        if self.inits is not None:
            params = jax.eval_shape(lambda tree: trees.take(tree, 0), params)
        traced, (shapes, client, server) = jax.make_jaxpr(one_round, return_shape=True)(
            hyper, root, params, self.examples["train"], member, self.central
        )
        _require_use(traced.jaxpr, len(jax.tree.leaves(self.central)))
        _check_same("client", shapes.state, client)
        _check_same("server", shapes.server, server)
        return shapes

    @property
    def name(self) -> str:
        """The function that made the client, such as "flix"."""
        client = self.algorithm.client
        return getattr(client, "__qualname__", "algorithm").split(".")[0]

    @property
    def algorithm(self) -> Algorithm:
        """What runs; of a sweep the first."""
        hyper = self.over if self.replicas is None else trees.take(self.over, 0)
        return self.settings.build(hyper)

    def enroll(
        self, members: Members, train: PyTree, cut: Cut
    ) -> tuple[RunningSum, tuple[PyTree, PyTree]]:
        """The sum of what clients send on joining; their states, as they are cut, and
        what each sends, where the reduction needs all of them.

        ``train`` are the rows that the members' places are in.
        """
        arguments = (self.initial.params, train, members, self._turns(cut))
        axes = (self.inits, None, self.placed, None)
        spread = ClientAxes((None, None, 0, 0), (None, 0), stay=1)
        program = ReplicaProgram("enroll", rounds.enroll, axes, (0, 1), spread=spread)
        return self.programs.call(program, arguments)

    def start(self, joined: RunningSum) -> tuple[PyTree, PyTree]:
        """The server's first message, and its state."""

        def begin(settings, hyper, root, params, joined, central):
            aggregate = finish(joined, settings.everyone)
            return rounds.start(settings, hyper, root, params, aggregate, central)

        arguments = (self.initial.params, joined, self.central)
        return self.programs.call(
            ReplicaProgram("start", begin, (self.inits, 0, None), 0), arguments
        )

    def block(
        self, shapes: Shapes, states: PyTree, plan: Members, train: PyTree, cut: Cut
    ) -> tuple[ReplicaProgram, tuple[Any, ...]]:
        """The program of some rounds, and its arguments between carry and bounds.

        States are given up to a call.
        """
        axes = (0, 1, None, None, self.keys, None, None, None)
        spread = ClientAxes(
            (None, 0, None, None, 1, 0, None, None), (None, 0, 1), stay=1
        )
        block = partial(rounds.block, shapes)
        program = ReplicaProgram(
            "block", block, axes, (0, 1, 0), donate=(3,), spread=spread
        )
        turns = self._turns(cut, together=bool(jax.tree.leaves(states)))
        return program, (states, train, self.central, plan, turns)

    def measure(
        self,
        asked: Evaluation,
        down: Down,
        states: PyTree,
        members: Members | tuple[()],
        examples: Mapping[str, PyTree],
        places: Mapping[str, tuple[jax.Array, jax.Array]],
    ) -> tuple[PyTree, PyTree]:
        """The metrics of clients, and what each row contributes.

        States and members are empty where the evaluation goes by rows.
        """
        arguments = (down, states, examples, members, places)
        placed = dict.fromkeys(places, (self.places, None))
        axes = (0, 1, None, self.placed if members else None, placed)
        return self.programs.call(
            ReplicaProgram("measure", asked.measure, axes, 0), arguments
        )

    def personal(self, down: Down, state: PyTree, shard: Shard) -> PyTree:
        """The model of one client."""
        placed: Any = Shard(None, self.places, None, None, shard.capacity)  # type: ignore
        program = ReplicaProgram("personal", evaluate.personal, (0, 0, placed), 0)
        return self.programs.call(program, (down, state, shard))

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


def _require_use(traced: Any, own: int) -> None:
    """Refuse rows of the server, the last arguments of a round, that no one reads."""
    read = {id(var) for step in traced.eqns for var in step.invars}
    read |= {id(var) for var in traced.outvars}
    if own and not any(id(var) in read for var in traced.invars[-own:]):
        raise SettingError(
            "central", "this algorithm has no use for rows of the server; leave it out"
        )


def _check_same(function: str, before: PyTree, after: PyTree) -> None:
    """Refuse an algorithm whose state changes its structure, shapes or dtypes."""
    before, after = (
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)
        for tree in (before, after)
    )
    if before != after:
        raise TypeError(f"{function}: the state changes from {before} to {after}")

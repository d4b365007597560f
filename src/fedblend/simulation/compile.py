# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compiling functions of one replica for all replicas, and for a mesh of devices.

A function is computed on one device unless it is spread. Arrays outside of spread
functions, but for the states of a block, lie on the first device of this process.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from fedblend.core import Key, PyTree
from fedblend.errors import UserError
from fedblend.simulation import devices
from fedblend.simulation.host import Worker
from fedblend.simulation.lowering import lower
from fedblend.simulation.rounds import Settings


class ClientAxes(NamedTuple):
    """The axes of clients of arguments and results, in one replica, or None.

    ``stay`` is the place of the result that is left on the devices where it lies.
    """

    arguments: tuple[int | None, ...]
    results: tuple[int | None, ...]
    stay: int | None = None


class ReplicaProgram(NamedTuple):
    """``function(settings, hyper, key, *arguments)`` of one replica, to be compiled.

    ``axes`` and ``out_axes`` are the axes of replicas; it is computed on one device
    unless it is ``spread``.
    """

    name: str
    function: Callable[..., Any]
    axes: tuple[Any, ...]
    out_axes: Any
    donate: tuple[int, ...] = ()
    spread: ClientAxes | None = None


class Programs:
    """The compiled programs of one simulation.

    Args:
        settings: of the simulation, the first argument of every function.
        fixed: the next two arguments: what is swept, and the key.
        axes: their axes of replicas; None where all replicas share them.
        replicas: how many there are; None without replicas.
        mesh: the devices of programs that are spread.
        rounds: of the whole run; a long one has kernels timed on a GPU.
        lasting: arguments that never change, and are brought to the devices once.
    """

    def __init__(
        self,
        settings: Settings,
        fixed: tuple[PyTree, Key],
        axes: tuple[int | None, int | None],
        replicas: int | None,
        mesh: Mesh,
        rounds: int,
        lasting: Callable[[], Sequence[PyTree]],
    ):
        self.compiled: dict[str, Any] = {}
        self.compile_seconds = 0.0
        self._settings, self._fixed, self._axes = settings, fixed, axes
        self._replicas, self._mesh, self._rounds = replicas, mesh, rounds
        self._lasting = lasting
        self._ahead: dict[str, Future] = {}
        self._compiler = Worker()
        self._everywhere: dict[int, tuple[PyTree, PyTree]] = {}

    def clock(self) -> float:
        """Seconds, during which compiling does not count."""
        return time.perf_counter() - self.compile_seconds

    def call(self, program: ReplicaProgram, arguments: Sequence[Any]) -> Any:
        """The result of a program: compiled at its first call, unless begun before."""
        arguments, lie = self._arguments(program, arguments)
        name, spread = program.name, program.spread
        if name not in self.compiled:
            begun = time.perf_counter()
            ahead = self._ahead.pop(name, None)
            self.compiled[name] = (
                self._compile(program, arguments, lie)()
                if ahead is None
                else ahead.result()
            )
            self.compile_seconds += time.perf_counter() - begun
        found = self._run(name, arguments)
        if spread is None:
            return found
        return tuple(
            one if place == spread.stay else devices.first_copy(one)
            for place, one in enumerate(found)
        )

    def begin(self, program: ReplicaProgram, arguments: Sequence[Any]) -> None:
        """Begin to compile a program, for arguments of which some are only shapes."""
        begun = time.perf_counter()
        compile = self._compile(program, *self._arguments(program, arguments))
        self._ahead[program.name] = self._compiler.submit(compile)
        self.compile_seconds += time.perf_counter() - begun

    def _arguments(
        self, program: ReplicaProgram, arguments: Sequence[Any]
    ) -> tuple[Any, Any]:
        """All arguments on their devices, and where these are."""
        arguments = (*self._fixed, *arguments)
        if program.spread is None:
            return arguments, None
        axes = (*self._axes, *program.axes)
        lie = self._lie(axes, (None, None, *program.spread.arguments))
        return tuple(map(self._place, arguments, lie)), lie

    def _compile(
        self, program: ReplicaProgram, arguments: Sequence[Any], lie: Any
    ) -> Callable[[], Any]:
        """What compiles a program in any thread: settings of JAX belong to this one."""
        _, function, axes, out_axes, donate, spread = program
        function = partial(function, self._settings)
        if self._replicas is not None:
            function = jax.vmap(function, (*self._axes, *axes), out_axes)
        jit_options: dict[str, Any] = {"donate_argnums": donate}
        if spread is not None:
            function, results = self._spread(function, lie, out_axes, spread)
            jit_options["out_shardings"] = results
        whole = devices.sharding(self._mesh, None, None)
        lowered = lower(
            jax.jit(function, **jit_options).trace(*arguments),
            arguments,
            lambda one: one if spread is None else self._place_once(one, whole),
            **jit_options,
        )
        options = devices.compiler_options(spread is not None, self._rounds)
        return partial(lowered.compile, options)

    def _run(self, name: str, arguments: Sequence[Any]) -> Any:
        try:
            return self.compiled[name](*arguments)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            allowed = "small enough: so many clients do not fit the device's memory"
            raise UserError("chunk", self._settings.chunk, allowed) from None

    def _lie(self, axes: Sequence[Any], clients: Sequence[int | None]) -> Any:
        """Where each argument or result lies, by its axes of replicas and clients."""

        def one(axes, clients):
            return jax.tree.map(
                lambda axis: devices.sharding(
                    self._mesh, None if self._replicas is None else axis, clients
                ),
                axes,
                is_leaf=lambda node: node is None,
            )

        return tuple(map(one, axes, clients))

    def _spread(
        self,
        function: Callable[..., Any],
        lie: Any,
        out_axes: Any,
        spread: ClientAxes,
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function on all devices of the mesh, each with its part of arguments.

        Also where its results lie.
        """
        outward = self._lie(out_axes, spread.results)
        function = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=jax.tree.map(lambda one: one.spec, lie),
            out_specs=jax.tree.map(lambda one: one.spec, outward),
            check_vma=False,
        )
        whole = devices.sharding(self._mesh, None, None)
        results = tuple(
            one if place == spread.stay else whole for place, one in enumerate(outward)
        )
        return function, results

    def _place(self, argument: PyTree, lie: Any) -> PyTree:
        """An argument on its devices; what never changes is brought there once."""
        if any(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(argument)
        ):
            return jax.tree.map(lambda leaf: leaf.update(sharding=lie), argument)
        lasting = (*self._fixed, *self._lasting())
        if not any(argument is one for one in lasting):
            return devices.place(argument, lie)
        return self._place_once(argument, lie)

    def _place_once(self, argument: PyTree, lie: Any) -> PyTree:
        """What never changes, on its devices; it is kept, so that its id stays."""
        if id(argument) not in self._everywhere:
            found = devices.place(argument, lie)
            self._everywhere[id(argument)] = (argument, found)
        return self._everywhere[id(argument)][1]

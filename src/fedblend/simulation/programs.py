# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compiling functions of one replica for all replicas, and for a mesh of devices.

A function is computed on one device unless it is spread. Arrays outside of spread
functions, but for the states of a block, lie on the first device of this process.
"""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedblend.core import Key, PyTree, Shard
from fedblend.errors import UserError
from fedblend.simulation import devices
from fedblend.simulation.chunks import Cut
from fedblend.simulation.constants import compile_traced
from fedblend.simulation.device_store import Slots
from fedblend.simulation.rounds import Members, Settings


class Spread(NamedTuple):
    """The axes of clients of arguments and results, in one replica, or None.

    ``stay`` is the place of the result that is left on the devices where it lies.
    """

    arguments: tuple[int | None, ...]
    results: tuple[int | None, ...]
    stay: int | None = None


class Programs:
    """The programs of one simulation, and what never changes of their arguments.

    ``sweep``, ``keys``, ``inits`` and ``places`` are the axes of replicas that the
    swept values, the keys, the initial parameters and the starts of rows have: 0, or
    None where all replicas share them. Without a mesh there is one device.
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
        mesh: Mesh | None = None,
    ):
        self.mesh = devices.mesh_of(jax.local_devices()[:1]) if mesh is None else mesh
        self.width = self.mesh.shape[devices.CLIENTS]
        self.settings = settings._replace(width=self.width)
        self.key, self.over, self.params = key, over, params
        self.examples, self.central, self.replicas = examples, central, replicas
        self.sweep = 0 if over is not None else None
        self.keys = 0 if key.ndim else None
        self.inits = 0 if own_params else None
        self.places = 0 if own_rows else None
        self.placed = Members(None, None, self.places, None, None, None)  # type: ignore
        self.compile_seconds = 0.0
        self.compiled: dict[str, Any] = {}
        self._everywhere: dict[int, tuple[PyTree, PyTree]] = {}

    def _turns(self, cut: Cut, together: bool = False) -> np.ndarray | None:
        """The chunks of each group of a device; all devices take as many ``together``.

        They must where states move between them, whatever chunks of padding cost.
        """
        if cut.groups == 1:
            return None
        if not together:
            return cut.turns
        most = cut.turns.reshape(self.width, -1).max(axis=0)
        return np.tile(most, self.width)

    @property
    def first_device(self) -> Any:
        """Where everything lies that is not spread."""
        return jax.local_devices()[0]

    @cached_property
    def slots(self) -> Slots:
        """How the states of a block lie on the devices."""
        replicas = None if self.replicas is None else 1
        return Slots(self.width, devices.sharding(self.mesh, replicas, 0))

    def place_plan(self, plan: Members) -> Members:
        """The members of a block's rounds on their devices."""
        return devices.placed(plan, devices.sharding(self.mesh, self.keys, 1))

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        axes: Sequence[Any],
        out_axes: Any,
        donate: tuple[int, ...] = (),
        spread: "Spread | None" = None,
    ) -> Any:
        """``function(settings, hyper, key, *arguments)``, compiled when first called.

        ``axes`` and ``out_axes`` are the axes of replicas; it is computed on one device
        unless it is ``spread``.
        """
        arguments = (self.over, self.key, *arguments)
        axes = (self.sweep, self.keys, *axes)
        lie = (
            None if spread is None else self._lie(axes, (None, None, *spread.arguments))
        )
        if lie is not None:
            arguments = tuple(map(self._placed, arguments, lie))
        if name not in self.compiled:
            begun = time.perf_counter()
            function = partial(function, self.settings)
            if self.replicas is not None:
                function = jax.vmap(function, axes, out_axes)
            jit_options: dict[str, Any] = {"donate_argnums": donate}
            if spread is not None:
                function, results = self._spread(function, lie, out_axes, spread)
                jit_options["out_shardings"] = results
            whole = devices.sharding(self.mesh, None, None)
            self.compiled[name] = compile_traced(
                jax.jit(function, **jit_options).trace(*arguments),
                arguments,
                lambda one: one if spread is None else self._placed_once(one, whole),
                None if spread is None else devices.compiler_options(),
                **jit_options,
            )
            self.compile_seconds += time.perf_counter() - begun
        found = self._run(name, arguments)
        if spread is None:
            return found
        return tuple(
            one if place == spread.stay else devices.local(one)
            for place, one in enumerate(found)
        )

    def _run(self, name: str, arguments: Sequence[Any]) -> Any:
        try:
            return self.compiled[name](*arguments)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            allowed = "small enough: so many clients do not fit the device's memory"
            raise UserError("chunk", self.settings.chunk, allowed) from None

    def _lie(self, axes: Sequence[Any], clients: Sequence[int | None]) -> Any:
        """Where each argument or result lies, by its axes of replicas and clients."""

        def one(axes, clients):
            return jax.tree.map(
                lambda axis: devices.sharding(
                    self.mesh, None if self.replicas is None else axis, clients
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
        spread: "Spread",
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function on all devices of the mesh, each with its part of arguments.

        Also where its results lie.
        """
        outward = self._lie(out_axes, spread.results)
        function = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=jax.tree.map(lambda one: one.spec, lie),
            out_specs=jax.tree.map(lambda one: one.spec, outward),
            check_vma=False,
        )
        whole = devices.sharding(self.mesh, None, None)
        results = tuple(
            one if place == spread.stay else whole for place, one in enumerate(outward)
        )
        return function, results

    def _placed(self, argument: PyTree, lie: Any) -> PyTree:
        """An argument on its devices; what never changes is brought there once."""
        lasting = (self.over, self.key, self.params, self.central)
        lasting = (*lasting, *self.examples.values())
        if not any(argument is one for one in lasting):
            return devices.placed(argument, lie)
        return self._placed_once(argument, lie)

    def _placed_once(self, argument: PyTree, lie: Any) -> PyTree:
        """What never changes, on its devices; it is kept, so that its id stays."""
        if id(argument) not in self._everywhere:
            found = devices.placed(argument, lie)
            self._everywhere[id(argument)] = (argument, found)
        return self._everywhere[id(argument)][1]

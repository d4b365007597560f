# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compile functions of one replica for all replicas and for a mesh of devices.

A function runs on one device unless it is spread over the mesh. All arrays lie on the
first device of the process, except inside spread functions, and except for the client
states of a block.

Before XLA compiles a program, two things in it are replaced.

*Large constants become arguments.* A loss may use arrays that are not its arguments,
such as the frozen base of a model with adapters. JAX writes them into the program as
constants, which XLA copies, folds and hashes: this costs seconds and several times
their memory, for each program. As arguments, all programs share one array. Constants
inside a function that is wrapped in ``jax.jit`` stay.

*On a CPU, large batches of decompositions become loops over small ones.* jaxlib hands a
large batch of matrices to XLA's threads in parts, and the calling thread waits for
them. Independent operations, and those of all devices, run in the same threads: once
every thread waits for parts, no thread is left to compute one, and the program never
ends. A small batch is decomposed by the thread that asks for it. Each matrix is still
decomposed by itself, so results keep their bits.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh

from fedblend.core import Key, PyTree
from fedblend.errors import UserError
from fedblend.simulation import devices
from fedblend.simulation.devices import Worker
from fedblend.simulation.rounds import Settings

LARGE = 2**16
"""Bytes from which on a constant becomes an argument."""


class Lowered(NamedTuple):
    """A function to be compiled, in any thread; ``constants`` come first."""

    lowered: Any
    constants: tuple[tuple[jax.Array, ...], ...] = ()

    def compile(
        self, compiler_options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Compile it with these options of XLA."""
        compiled = self.lowered.compile(compiler_options=compiler_options)
        return partial(compiled, *self.constants)


def lower(
    traced: Any,
    arguments: Sequence[Any],
    place: Callable[[jax.Array], jax.Array] = lambda constant: constant,
    **jit_options: Any,
) -> Lowered:
    """A function with its large constants as arguments.

    Args:
        traced: of ``jax.jit(function, ...).trace(*arguments)``.
        arguments: those that are not static; shapes will do.
        place: brings a constant to the devices of the program.
        jit_options: those that the function was traced with; ``donate_argnums`` are
            places in ``arguments``.
    """
    function, constants = _lift(traced)
    if function is None:
        return Lowered(traced.lower())
    donated = tuple(1 + one for one in jit_options.pop("donate_argnums", ()))
    jitted = jax.jit(function, donate_argnums=donated, **jit_options)
    given = (tuple(map(place, constants)),)
    return Lowered(jitted.lower(*given, *arguments), given)


def jit(function: Callable[..., Any], static: int) -> Callable[..., Any]:
    """``jax.jit`` with large constants as arguments.

    Args:
        function: of hashable arguments first, then of arrays.
        static: the number of the hashable ones.
    """

    @lru_cache(maxsize=64)
    def program_of(fixed, structure, shapes, x64):
        del x64  # JAX traces anew where it changes
        jitted = jax.jit(partial(function, *fixed))
        lifted, constants = _lift(jitted.trace(*structure.unflatten(shapes)))
        return jitted if lifted is None else partial(jax.jit(lifted), constants)

    @wraps(function)
    def call(*arguments):
        leaves, structure = jax.tree.flatten(arguments[static:])
        kinds: list[Any] = list(map(jax.typeof, leaves))
        shapes = tuple(
            jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)
            for kind in kinds
        )
        x64 = jax.config.jax_enable_x64  # pyright: ignore
        program = program_of(arguments[:static], structure, shapes, x64)
        return program(*arguments[static:])

    call.cache_info = program_of.cache_info  # pyright: ignore
    call.cache_clear = program_of.cache_clear  # pyright: ignore
    return call


def _lift(traced: Any) -> tuple[Callable[..., Any] | None, tuple[jax.Array, ...]]:
    """The function of (constants, *arguments), and its large constants.

    None where nothing is to be changed. On a CPU large batches of decompositions are
    (``decompositions``).
    """
    program = traced.jaxpr
    large = [place for place, one in enumerate(program.consts) if one.nbytes >= LARGE]
    on_cpu = jax.default_backend() == "cpu"
    inner = split_batches(program.jaxpr) if on_cpu else program.jaxpr
    if not large and inner is program.jaxpr:
        return None, ()

    def function(constants, *arguments):
        every = list(program.consts)
        for place, constant in zip(large, constants, strict=True):
            every[place] = constant
        compute = jaxpr_as_fun(ClosedJaxpr(inner, every))
        found = compute(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(traced.out_tree, found)

    return function, tuple(program.consts[place] for place in large)


RANKS = {
    "cholesky": 2,
    "eig": 2,
    "eigh": 2,
    "geqp3": 2,
    "geqrf": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}
"""Primitives that jaxlib shares among threads: the axes of one matrix (or diagonal)."""
TOGETHER = 2**12
"""Cubes of rows in a small batch. jaxlib counts at most 30 operations for each, and
shares out batches from 200,000 operations on."""


def split_batches(program: Any) -> Any:
    """A jaxpr without large batches of decompositions; the same one if it has none."""
    steps = [_small_batches(step) for step in program.eqns]
    changed = any(new is not old for new, old in zip(steps, program.eqns, strict=True))
    return program.replace(eqns=steps) if changed else program


def _small_batches(step: Any) -> Any:
    """One step of a jaxpr, and the jaxprs inside it."""
    if step.primitive.name in RANKS:
        return _make_loop(step)

    def replace(value: Any) -> Any:
        """A jaxpr that a step calls, with its constants or without."""
        inner = getattr(value, "jaxpr", value)
        found = split_batches(inner) if hasattr(value, "eqns") else inner
        if found is inner:
            return value
        return found if inner is value else value.replace(jaxpr=found)

    leaves, tree = jax.tree.flatten(
        step.params, is_leaf=lambda value: hasattr(value, "eqns")
    )
    found = list(map(replace, leaves))
    if all(new is old for new, old in zip(found, leaves, strict=True)):
        return step
    return step.replace(params=tree.unflatten(found))


def _make_loop(step: Any) -> Any:
    """A decomposition of a large batch as a call of a loop over small ones."""
    shapes = [one.aval.shape for one in step.invars]
    axes = len(shapes[0]) - RANKS[step.primitive.name]
    batch = shapes[0][:axes]
    most = max(TOGETHER // max(max(shape[axes:]) for shape in shapes) ** 3, 1)
    if math.prod(batch) <= most:
        return step

    def one(operands):
        return step.primitive.bind(*operands, **step.params)

    @jax.jit
    def loop(*operands):
        rows = [leaf.reshape(-1, *leaf.shape[axes:]) for leaf in operands]
        found = jax.lax.map(one, rows, batch_size=most)
        return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), found)

    given = [jax.ShapeDtypeStruct(of.aval.shape, of.aval.dtype) for of in step.invars]
    (call,) = jax.make_jaxpr(loop)(*given).eqns
    return call.replace(invars=step.invars, outvars=step.outvars)


def compile_cache(folder: str | Path | None = None) -> Path | None:
    """Keep what JAX compiles in a folder, for this and later processes.

    Call it before the first run. The commands of ``fedblend`` do; a folder that JAX was
    given already (``JAX_COMPILATION_CACHE_DIR``) stays. On a GPU the folder also has
    what XLA found out by timing kernels, so a later run chooses the same ones.

    Args:
        folder: where; by default ``fedblend/jax`` in the user's cache.

    Returns:
        The folder in use, or None where none can be written.
    """
    there = jax.config.jax_compilation_cache_dir  # pyright: ignore
    if there is not None:
        return Path(there)
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(home) if home else Path.home() / ".cache") / "fedblend" / "jax"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A run begins with many small programs; together they take as long as a large one.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(folder)


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
        try:
            found = self.compiled[name](*arguments)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            allowed = "small enough: so many clients do not fit the device's memory"
            raise UserError("chunk", self._settings.chunk, allowed) from None
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
        whole = devices.sharding(self._mesh, None, None)
        if spread is not None:  # on all devices, each with its part of arguments
            outward = self._lie(out_axes, spread.results)
            function = jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=jax.tree.map(lambda one: one.spec, lie),
                out_specs=jax.tree.map(lambda one: one.spec, outward),
                check_vma=False,
            )
            jit_options["out_shardings"] = tuple(
                one if place == spread.stay else whole
                for place, one in enumerate(outward)
            )
        lowered = lower(
            jax.jit(function, **jit_options).trace(*arguments),
            arguments,
            lambda one: one if spread is None else self._place_once(one, whole),
            **jit_options,
        )
        options = devices.compiler_options(spread is not None, self._rounds)
        return partial(lowered.compile, options)

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

    def _place(self, argument: PyTree, lie: Any) -> PyTree:
        """An argument on its devices; what never changes is brought there once."""
        if any(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(argument)
        ):
            return jax.tree.map(lambda leaf: leaf.update(sharding=lie), argument)
        lasting = (*self._fixed, *self._lasting())
        if not any(argument is one for one in lasting):
            return jax.device_put(argument, lie)
        return self._place_once(argument, lie)

    def _place_once(self, argument: PyTree, lie: Any) -> PyTree:
        """What never changes, on its devices; it is kept, so that its id stays."""
        if id(argument) not in self._everywhere:
            found = jax.device_put(argument, lie)
            self._everywhere[id(argument)] = (argument, found)
        return self._everywhere[id(argument)][1]

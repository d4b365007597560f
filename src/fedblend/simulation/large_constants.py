# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Large arrays that a function refers to, as arguments of its compiled program.

A loss refers to more than its arguments: to the frozen base of a model with adapters,
for instance. JAX writes such arrays into the program as constants, where XLA copies,
folds and hashes them: seconds, and several times their memory, for each program. Here
they become arguments, so that all programs share the one array.

What a function that is wrapped in ``jax.jit`` itself refers to stays a constant.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedblend.simulation.decompositions import in_small_batches

LARGE = 2**16
"""Bytes from which on a constant becomes an argument."""


class Compiled(NamedTuple):
    """A compiled function, and what it is given before its arguments."""

    compiled: Any
    constants: tuple[tuple[jax.Array, ...], ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns."""
        return self.compiled(*self.constants, *arguments)


class Lowered(NamedTuple):
    """A function to be compiled, in any thread."""

    lowered: Any
    constants: tuple[tuple[jax.Array, ...], ...] = ()

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compile it with these options of XLA."""
        compiled = self.lowered.compile(compiler_options=compiler_options)
        return Compiled(compiled, self.constants)


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
    function, constants = _lifted(traced)
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
        arguments = jax.tree.unflatten(structure, shapes)
        jitted = jax.jit(function, static_argnums=tuple(range(static)))
        lifted, constants = _lifted(jitted.trace(*fixed, *arguments))
        if lifted is None:
            return partial(jitted, *fixed)  # it is traced already
        return partial(jax.jit(lifted), constants)

    @wraps(function)
    def call(*arguments):
        given = arguments[static:]
        leaves, structure = jax.tree.flatten(given)
        shapes = tuple(map(_shape_of, leaves))
        x64 = jax.config.jax_enable_x64  # pyright: ignore
        return program_of(arguments[:static], structure, shapes, x64)(*given)

    call.cache_info = program_of.cache_info  # pyright: ignore
    call.cache_clear = program_of.cache_clear  # pyright: ignore
    return call


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    kind: Any = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _lifted(traced: Any) -> tuple[Callable[..., Any] | None, tuple[jax.Array, ...]]:
    """The function of (constants, *arguments), and its large constants.

    None where nothing is to be changed. On a CPU large batches of decompositions are
    (``decompositions``).
    """
    program = traced.jaxpr
    large = [place for place, one in enumerate(program.consts) if one.nbytes >= LARGE]
    on_cpu = jax.default_backend() == "cpu"
    inner = in_small_batches(program.jaxpr) if on_cpu else program.jaxpr
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

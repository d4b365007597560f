# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A loop whose length is a client's own, for clients that are mapped together.

``vmap`` of a ``fori_loop`` runs until the longest is done, while the others stand still
and cost as much. Here fewer *seats* than clients advance together. The longest begin;
whoever is done gives its seat to the next longest, until nobody waits. A seat costs a
step, whoever sits on it, so that a round costs what the clients need, nearly; and as
long as the seats are not too few, it takes as many turns as its longest client.

With L clients, of ``even`` times as many steps in the mean as the longest of them has,
``even L`` seats would do if they could be filled without a gap. What a client computes
does not depend on its seat. Steps that are so small that a GPU waits for their latency
only take no longer for more clients: there everybody has a seat.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fedblend import trees
from fedblend.core import PyTree

FEWEST = 4
"""Clients mapped together; fewer take all their seats at once."""
EVEN = 0.85
"""Seats per client from which on nobody has to wait: there is little to gain."""

GPU_PRODUCTS = 2**24
"""Multiplications in a client's step from which on a GPU gains by fewer seats."""

Step = Callable[..., Sequence[Any]]
"""``step(number, constants, carry)``: a carry again; all are lists of arrays."""


def own_loop(
    own: jax.Array, step: Callable[[Any, PyTree], PyTree], first: PyTree, even: float
) -> PyTree:
    """``jax.lax.fori_loop(0, own, step, first)``, mapped over uneven clients or not.

    Args:
        own: the number of steps of this client.
        step: ``step(number, carry)``, a carry of the same shapes and dtypes.
        first: the carry at the start.
        even: mean over the largest number of steps, of all clients.
    """
    if even >= EVEN or jax.config.jax_disable_jit:  # pyright: ignore
        return jax.lax.fori_loop(0, own, step, first)
    leaves, tree = jax.tree.flatten(trees.strongly_typed(first))

    def flat(number, *carry):
        return jax.tree.leaves(step(number, tree.unflatten(carry)))

    # What the step refers to must be arguments: clients have their own values of it.
    program = jax.make_jaxpr(flat)(jnp.zeros_like(own), *leaves)

    def advance(number, constants, carry):
        return jaxpr_as_fun(ClosedJaxpr(program.jaxpr, constants))(number, *carry)

    if jax.default_backend() != "cpu" and multiplications(program.jaxpr) < GPU_PRODUCTS:
        return jax.lax.fori_loop(0, own, step, tree.unflatten(leaves))
    found = _alone(advance, even)(own, list(program.consts), leaves)
    return tree.unflatten(found)


def multiplications(program: Any) -> int:
    """Multiplications of a jaxpr's matrix products and convolutions, loops once."""
    total = 0
    for equation in program.eqns:
        inner: list[Any] = [one.aval for one in equation.invars]
        size = sum(math.prod(one.aval.shape) for one in equation.outvars)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += size * math.prod(inner[0].shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            outputs = equation.params["dimension_numbers"].rhs_spec[0]
            kernel = inner[1].shape
            total += size * math.prod(kernel) // kernel[outputs]
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda one: hasattr(one, "eqns")
        ):
            inside = getattr(value, "jaxpr", value)
            total += multiplications(inside) if hasattr(inside, "eqns") else 0
    return total


def _plain(step: Step, own, constants, first):
    def advance(number, carry):
        return step(number, constants, carry)

    return jax.lax.fori_loop(0, own, advance, first)


def _alone(step: Step, even: float) -> Callable[..., list[jax.Array]]:
    """The loop of one client, which may be mapped."""

    @custom_vmap
    def loop(own, constants, first):
        return _plain(step, own, constants, first)

    @loop.def_vmap
    def map_loop(size, batched, own, constants, first):
        unequal, constants_mapped, first_mapped = batched
        if unequal:
            several = _together(step, even, constants_mapped, first_mapped)
        else:
            first = [
                _along(size, *one) for one in zip(first, first_mapped, strict=True)
            ]
            several = _alone(_each(step, None, constants_mapped), even)
        return several(own, constants, first), [True] * len(first)

    return loop


def _together(
    step: Step, even: float, own_constants: Sequence[bool], own_first: Sequence[bool]
) -> Callable[..., list[jax.Array]]:
    """The loops of several clients at once, which may be mapped over replicas.

    ``own_constants`` and ``own_first`` say which arrays have an axis of clients.
    """

    @custom_vmap
    def loop(own, constants, first):
        # Less what rounding adds: 0.1 * 30 is a bit more than 3.
        seats = max(math.ceil(even * len(own) - 1e-6), 2)
        if len(own) < FEWEST or seats >= EVEN * len(own):
            axes = (0, _axes(own_constants), _axes(own_first))
            return jax.vmap(lambda *one: _plain(step, *one), axes)(
                own, constants, first
            )
        return _take_turns(step, seats, own_constants, own_first, own, constants, first)

    @loop.def_vmap
    def map_loop(size, batched, own, constants, first):
        unequal, constants_mapped, first_mapped = batched
        clients = own.shape[-1]
        if not unequal:  # replicas with the same clients advance together
            first = [
                _along(size, *one) for one in zip(first, first_mapped, strict=True)
            ]
            inside = _each(step, None, constants_mapped)
            mapped_too = [True] * len(first)
            constants = _clients_first(constants, own_constants, constants_mapped)
            first = _clients_first(first, own_first, mapped_too)
            several = _together(inside, even, own_constants, own_first)
            found = several(own, constants, first)
            return [jnp.swapaxes(leaf, 0, 1) for leaf in found], mapped_too
        # Clients of all replicas are one crowd.
        constants, all_constants = _crowd(
            size, clients, constants, own_constants, constants_mapped
        )
        first, all_first = _crowd(size, clients, first, own_first, first_mapped)
        several = _together(step, even, all_constants, all_first)
        found = several(own.reshape(-1), constants, first)
        apart = [leaf.reshape(size, clients, *leaf.shape[1:]) for leaf in found]
        return apart, [True] * len(apart)

    return loop


def _axes(own: Sequence[bool]) -> list[int | None]:
    return [0 if one else None for one in own]


def _each(step: Step, numbers: int | None, own_constants: Sequence[bool]) -> Step:
    """The step of several at once."""
    return jax.vmap(step, (numbers, _axes(own_constants), 0))


def _along(size: int, leaf, mapped: bool):
    return leaf if mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))


def _clients_first(leaves, own, mapped):
    """Arrays [replicas, clients, ...] as [clients, replicas, ...]."""
    return [
        jnp.swapaxes(leaf, 0, 1) if of_client and of_replica else leaf
        for leaf, of_client, of_replica in zip(leaves, own, mapped, strict=True)
    ]


def _crowd(size: int, clients: int, leaves, own, mapped):
    """Arrays over the clients of all replicas, and which of them are."""
    spread = []
    for leaf, of_client, of_replica in zip(leaves, own, mapped, strict=True):
        if of_client or of_replica:
            leaf = leaf if of_replica else leaf[None]
            leaf = leaf if of_client else leaf[:, None]
            rest = leaf.shape[2:]
            leaf = jnp.broadcast_to(leaf, (size, clients, *rest))
            leaf = leaf.reshape(size * clients, *rest)
        spread.append(leaf)
    return spread, [a or b for a, b in zip(own, mapped, strict=True)]


def _take_turns(
    step: Step, seats: int, own_constants, own_first, own, constants, first
):
    """The loops of all clients, ``seats`` of them at a time."""
    clients = len(own)
    order = jnp.argsort(own, descending=True)
    advance = _each(step, 0, own_constants)
    never = jnp.iinfo(own.dtype).max

    def pick(index, leaves, mapped):
        return [
            leaf[index] if one else leaf
            for leaf, one in zip(leaves, mapped, strict=True)
        ]

    def put(place, held, leaves, mapped):
        return [
            jax.lax.dynamic_update_index_in_dim(here, leaf, place, 0) if one else here
            for here, leaf, one in zip(held, leaves, mapped, strict=True)
        ]

    def until_one_is_done(turn, state):
        sitting, left, numbers, held, carry, reached = state
        more = left.min()
        carry = jax.lax.fori_loop(
            0, more, lambda step, here: advance(numbers + step, held, here), carry
        )
        numbers, left = numbers + more, left - more
        seat = left.argmin()
        everything = [True] * len(carry)
        reached = put(sitting[seat], reached, pick(seat, carry, everything), everything)
        # Where nobody waits the seat goes on with what is not looked at any more.
        after = order[jnp.minimum(turn + seats, clients - 1)]
        waits = turn + seats < clients
        sitting = sitting.at[seat].set(after)
        left = left.at[seat].set(jnp.where(waits, own[after], never))
        numbers = numbers.at[seat].set(0)
        held = put(seat, held, pick(after, constants, own_constants), own_constants)
        carry = put(seat, carry, pick(after, first, own_first), everything)
        return sitting, left, numbers, held, carry, reached

    def along(size, leaves):
        return [_along(size, *one) for one in zip(leaves, own_first, strict=True)]

    sitting = order[:seats]
    state = (
        sitting,
        own[sitting],
        jnp.zeros_like(own[:seats]),
        pick(sitting, constants, own_constants),
        along(seats, pick(sitting, first, own_first)),
        along(clients, first),
    )
    return jax.lax.fori_loop(0, clients, until_one_is_done, state)[-1]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Draws of cohorts: the sorted client ids of each of some rounds, by round alone.

A cohort does not depend on the block of rounds that it is drawn with.
"""

import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.core import Key

NOBODY = -1
"""In place of an id, after the last client of a cohort of random size."""


def cohorts(
    root: Key, rounds: Sequence[int], clients: int, size: int, population: int = 0
) -> np.ndarray:
    """The sorted client ids of each of these rounds, ``[rounds, size]``.

    Floyd's algorithm: the price is that of the cohort, whatever the federation's size.
    Populations are drawn independently of each other.
    """
    if size == clients:
        return np.broadcast_to(np.arange(clients), (len(rounds), clients))
    numbers = jnp.asarray(rounds, jnp.int32)
    draws = np.asarray(_draws(root, numbers, population, clients, size))
    chosen = np.empty((len(rounds), size), np.int64)
    for row, lots in enumerate(draws.tolist()):
        members = set()
        for newest, lot in enumerate(lots, start=clients - size):
            members.add(newest if lot in members else lot)
        chosen[row] = sorted(members)
    return chosen


def secret_cohorts(rounds: int, clients: int, size: int) -> np.ndarray:
    """As ``cohorts``, from the operating system: new in every call."""
    draw = secrets.SystemRandom().sample
    found = [sorted(draw(range(clients), size)) for _ in range(rounds)]
    return np.array(found, np.int64).reshape(rounds, size)


def dealt(
    root: Key,
    rounds: Sequence[int],
    clients: int,
    size: int,
    population: int = 0,
    *,
    epoch: int,
) -> np.ndarray:
    """As ``cohorts``, but within each ``epoch`` of rounds nobody is there twice.

    Every epoch has an order of its own in which the clients are dealt out; those who
    are left over sit it out. The price is that of shuffling the federation.
    """
    chosen = np.empty((len(rounds), size), np.int64)
    orders: dict[int, np.ndarray] = {}
    for row, number in enumerate(rounds):
        turn, place = divmod(number, epoch)
        if turn not in orders:
            orders[turn] = np.asarray(_order(root, turn, population, clients))
        hand = orders[turn][place * size : (place + 1) * size]
        chosen[row] = np.sort(hand)
    return chosen


def in_turns(
    root: Key, rounds: Sequence[int], clients: int, size: int, population: int = 0
) -> np.ndarray:
    """As ``cohorts``, but everybody's turn comes in one order, again and again.

    Who takes part does so again after ``clients // size`` rounds, or one more.
    """
    order = np.asarray(_order(root, 0, population, clients))
    first = np.asarray(rounds, np.int64)[:, None] * size
    return np.sort(order[(first + np.arange(size)) % clients], axis=1)


def poisson(
    root: Key,
    rounds: Sequence[int],
    clients: int,
    size: int,
    most: int,
    secret: bool = False,
) -> np.ndarray:
    """As ``cohorts``, each client with the chance size / clients by itself.

    A round's ids are followed by ``NOBODY``. Of a cohort for which there is no room the
    last clients are left out; ``theory.poisson`` accounts for the chance of it.

    Args:
        root: the lots are a function of it, unless they are secret.
        rounds: numbers of rounds.
        clients: all there are.
        size: clients of a round, in the mean.
        most: for which there is room.
        secret: whether lots come from the operating system.
    """
    found = np.full((len(rounds), most), NOBODY, np.int64)
    for row, number in enumerate(rounds):
        if secret:
            lots = np.frombuffer(secrets.token_bytes(8 * clients), np.uint64)
        else:
            lots = np.asarray(_lots(root, number, clients)).view(np.uint64)
        # Whole numbers: no chance is rounded up.
        chosen = np.flatnonzero(lots // np.uint64(2**64 // clients) < size)[:most]
        found[row, : len(chosen)] = chosen
    return found


def _lots(root: Key, number: int, clients: int) -> jax.Array:
    key = keys.at(root, "cohort", number)
    return jax.random.bits(key, (2 * clients,), jnp.uint32)


def _order(root: Key, turn: int, population: int, clients: int) -> jax.Array:
    key = keys.at(root, "order", turn, population)
    return jax.random.permutation(key, clients)


def _draws(
    root: Key, rounds: jax.Array, population: int, clients: int, size: int
) -> jax.Array:
    """For every round, one draw from 0..j for each j from clients - size on."""
    ends = jnp.arange(clients - size + 1, clients + 1)

    def draw(round):
        key = keys.at(root, "cohort", round, population)
        return jax.random.randint(key, (size,), 0, ends)

    return jax.vmap(draw)(rounds)


_draws = jax.jit(_draws, static_argnums=(3, 4))
_order = jax.jit(_order, static_argnums=3)
_lots = jax.jit(_lots, static_argnums=2)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who takes part: cohorts by client id, without replacement, from the keys alone."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys
from fedblend.core import Key


def cohorts(root: Key, rounds: Sequence[int], clients: int, size: int) -> np.ndarray:
    """The sorted client ids of each of these rounds, ``[rounds, size]``.

    Floyd's algorithm: the price is that of the cohort, whatever the federation's size.
    """
    if size == clients:
        return np.broadcast_to(np.arange(clients), (len(rounds), clients))
    draws = np.asarray(_draws(root, jnp.asarray(rounds, jnp.int32), clients, size))
    chosen = np.empty((len(rounds), size), np.int64)
    for row, lots in enumerate(draws.tolist()):
        members = set()
        for newest, lot in enumerate(lots, start=clients - size):
            members.add(newest if lot in members else lot)
        chosen[row] = sorted(members)
    return chosen


def _draws(root: Key, rounds: jax.Array, clients: int, size: int) -> jax.Array:
    """For every round, one draw from 0..j for each j from clients - size on."""
    ends = jnp.arange(clients - size + 1, clients + 1)

    def draw(round):
        return jax.random.randint(keys.at(root, "cohort", round), (size,), 0, ends)

    return jax.vmap(draw)(rounds)


_draws = jax.jit(_draws, static_argnums=(2, 3))

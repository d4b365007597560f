# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise that is correlated over rounds by a strategy of ``theory.blt``: ``C^-1 z``.

::

    w <- z - sum over j of weights_j s_j,     s_j <- decays_j s_j + w,     z = N(0, 1)

The buffers s_j are as secret as the noise: with ``"system"`` they stay in this module,
in the memory of this process, under a name that works once. Whoever comes with a name
that is used up, or of another process (a run that was resumed, or one that goes on
twice from the same state), gets empty buffers: the strategy begins anew, and no z is
ever in the noise of two different sums. ``theory.blt`` says why this costs accuracy and
no privacy.

Separation is counted in rounds, so that a round in which nobody answers is a round of
the strategy, too: its noise is added to that of the next round with an answer. Sums of
two rounds' outputs reveal no more than both.
"""

import threading
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.core import Key, PyTree
from fedblend.theory.blt import Blt
from fedblend.transforms.noise import (
    NO_NAME,
    add_noise,
    add_on_grid,
    call_host,
    entries,
    new_name,
    new_secret,
    normal_of,
)

MAX_BYTES = 2**32
"""Of buffers that are kept; those that are dropped, the oldest ones, begin anew."""


class Buffers(NamedTuple):
    """The buffers s_j, [buffers, ...], before this round; with noise from the seed."""

    values: PyTree
    round: jax.Array


def first_buffers(strategy: Blt, shared: PyTree, from_seed: bool) -> PyTree:
    """The state of the noise before the first round.

    Args:
        strategy: how noise is correlated.
        shared: the model, whose shapes updates have.
        from_seed: whether the noise will have a key.
    """
    if not from_seed:
        return jnp.asarray(NO_NAME)
    count = len(strategy.decays)
    values = jax.tree.map(
        lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shared
    )
    return Buffers(values, jnp.zeros((), jnp.int32))


def add_blt_noise(
    tree: PyTree,
    std: float,
    state: PyTree,
    *,
    strategy: Blt,
    round: jax.Array,
    counts: jax.Array,
    key: Key | None,
) -> tuple[PyTree, PyTree]:
    """The tree plus the noise of all rounds since the state's, and the next state.

    Args:
        tree: of arrays.
        std: of z, in the tree's own unit.
        state: of ``first_buffers``, or the last call's.
        strategy: how noise is correlated.
        round: the number of this round.
        counts: whether the round has an answer; if not, noise from the operating
            system stays as it is, as the state will.
        key: of this round, of which z is a function; from the operating system if None.
    """
    if key is not None:
        return _add_from_seed(tree, std, state, strategy, round, key)
    leaves, structure = jax.tree.flatten(tree)
    correlate = partial(_correlate, strategy)
    name, *noisy = call_host(correlate, [state], leaves, state, round, counts, std)
    return jax.tree.unflatten(structure, noisy), name


def _add_from_seed(
    tree: PyTree,
    std: float,
    state: Buffers,
    strategy: Blt,
    round: jax.Array,
    key: Key,
) -> tuple[PyTree, Buffers]:
    def weigh(buffers):
        return jnp.tensordot(jnp.asarray(strategy.weights, buffers.dtype), buffers, 1)

    def decay(buffers, noise):
        decays = jnp.asarray(strategy.decays, buffers.dtype)
        return decays.reshape(-1, *[1] * noise.ndim) * buffers + noise[None]

    def one(values, key):
        kept = jax.tree.map(weigh, values)
        noise = add_noise(trees.scale(-1.0, kept), std, key)
        return noise, jax.tree.map(decay, values, noise)

    def add_missed(number, so_far):
        total, values = so_far
        noise, values = one(values, keys.derive(key, "missed", number))
        return add_given(total, noise), values

    def add_given(total, noise):
        """Where clients send nothing, noise is kept and not added."""
        return trees.add(total, trees.where_given(total, noise))

    begin = (tree, state.values)
    total, values = jax.lax.fori_loop(state.round, round, add_missed, begin)
    noise, values = one(values, key)
    return add_given(total, noise), Buffers(values, round + 1)


class _Kept(NamedTuple):
    """The buffers, [buffers, entries], before this round, in units of z."""

    values: np.ndarray
    round: int


_KEPT: dict[bytes, _Kept] = {}
_KEEPING = threading.Lock()


def _correlate(
    strategy: Blt,
    name: np.ndarray,
    round: np.ndarray,
    counts: np.ndarray,
    std: np.ndarray,
    *leaves: np.ndarray,
) -> list[np.ndarray]:
    if not counts:
        return [name, *leaves]
    size, last = entries(leaves), int(round)
    with _KEEPING:
        kept = _KEPT.pop(np.asarray(name).tobytes(), None)
    if kept is None or kept.round > last:
        kept = _Kept(np.zeros((len(strategy.decays), size)), last)
    decays, weights = np.array(strategy.decays)[:, None], np.array(strategy.weights)
    values, noise = kept.values, np.zeros(size)
    for _ in range(kept.round, last + 1):
        fresh = normal_of(new_secret(), size) - weights @ values
        values, noise = decays * values + fresh, noise + fresh
    fresh_name = new_name()
    # Several devices call this at a time.
    with _KEEPING:
        _KEPT[fresh_name.tobytes()] = _Kept(values, last + 1)
        used = sum(one.values.nbytes for one in _KEPT.values())
        while len(_KEPT) > 1 and used > MAX_BYTES:
            used -= _KEPT.pop(next(iter(_KEPT))).values.nbytes
    return [fresh_name, *add_on_grid(leaves, float(std), noise)]

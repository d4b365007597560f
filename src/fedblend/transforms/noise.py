# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise for privacy: from the operating system's entropy, or from a key.

Whoever can draw the noise again subtracts it. Noise ``"system"`` is a function of 256
bits that the operating system draws for it. They stay in this module, in the memory of
this process: no key, state, message, checkpoint or result has them. The noise is added
on the host, also where the server's step is compiled::

    y <- round((x + std w) / grid) grid,   w made of this and earlier g = N(0, 1)
    grid = 2^(floor(log2 std) - GRAIN_BITS)

x is the value as the device computed it, the sum is in float64, and y is then rounded
to the type of x. A mechanism with real numbers, rounded to a grid that depends on the
noise's scale alone, is as private as the mechanism: rounding comes after the noise.
Low bits of y, from which Mironov read x, are those of the grid. g comes from SHAKE-256
and the transform of Box and Muller, made of two uniform numbers of 53 bits, and at most
8.7 in size; docs/privacy.md says what is not covered.

Noise from a key is reproducible, and protects nobody from those who know the seed.

Reference: Mironov, "On significance of the least significant bits for differential
privacy", CCS 2012; Box, Muller, "A note on the generation of random normal deviates",
1958.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from fedblend.core import Key, PyTree

SOURCES = ("system", "seed")
"""Where noise may come from."""
GRAIN_BITS = 10
"""The grid of noisy values is so many powers of two finer than the noise."""
PIECE_BYTES = 2**16
"""Of an argument of a function on the host; JAX copies up to 100 KB at once."""
MAX_TREES = 4096
"""Trees that are kept; one that is dropped begins anew, which costs accuracy only."""


def add_noise(tree: PyTree, std: float | jax.Array, key: Key | None) -> PyTree:
    """The tree plus independent Gaussian noise of this standard deviation.

    Args:
        tree: of arrays.
        std: in the tree's own unit.
        key: the noise is a function of it; from the operating system if None.
    """
    leaves, structure = jax.tree.flatten(tree)
    if key is None:
        noisy = on_host(_add_new, [], leaves, std)
    else:
        noisy = [
            leaf
            + jnp.asarray(std, leaf.dtype)
            * jax.random.normal(own, leaf.shape, leaf.dtype)
            for leaf, own in zip(
                leaves, jax.random.split(key, len(leaves)), strict=True
            )
        ]
    return jax.tree.unflatten(structure, noisy)


def add_tree_noise(
    tree: PyTree,
    std: float | jax.Array,
    name: jax.Array,
    number: jax.Array,
    counts: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """The tree plus ``N_s - N_(s-1)`` of ``dp_ftrl``, and the name of what is kept.

    A name is used once. Whoever comes with one that is used up, or of another process
    (a run that was resumed, or one that goes on twice from the same state), gets a new
    binary tree: no two sums ever have the noise of the same node.

    Args:
        tree: of arrays.
        std: of the noise of a node.
        name: under which the nodes of the sum so far are kept; ``NO_NAME`` at first.
        number: of the binary tree; another number begins a new one.
        counts: whether the round counts; if not, nothing changes.
    """
    leaves, structure = jax.tree.flatten(tree)
    name, *noisy = on_host(_grow, [name], leaves, name, number, counts, std)
    return jax.tree.unflatten(structure, noisy), name


NO_NAME = np.zeros(4, np.uint32)
"""The name of no nodes."""


def perturb(leaves: Sequence[np.ndarray], std: float) -> list[np.ndarray]:
    """Arrays plus independent noise from the operating system, on the grid."""
    return add_on_grid(leaves, std, normal_of(new_secret(), entries(leaves)))


class _Nodes(NamedTuple):
    """The secrets of the nodes whose noise is in the sum of so many rounds, by level.

    Levels are the ones of ``rounds`` in binary.
    """

    number: int
    rounds: int
    secrets: dict[int, bytes]


_KEPT: dict[bytes, _Nodes] = {}


def _add_new(std: np.ndarray, *leaves: np.ndarray) -> list[np.ndarray]:
    return perturb(leaves, float(std))


def _grow(
    name: np.ndarray,
    number: np.ndarray,
    counts: np.ndarray,
    std: np.ndarray,
    *leaves: np.ndarray,
) -> list[np.ndarray]:
    if not counts:
        return [name, *leaves]
    nodes = _KEPT.pop(np.asarray(name).tobytes(), None)
    if nodes is None or nodes.number != number:
        nodes = _Nodes(int(number), 0, {})
    rounds = nodes.rounds + 1
    # The lowest one of the new number is a new node, over those of the levels below.
    top = (rounds & -rounds).bit_length() - 1
    ended = [nodes.secrets[level] for level in range(top)]
    rest = {level: own for level, own in nodes.secrets.items() if level > top}
    new, fresh = new_secret(), new_name()
    _KEPT[fresh.tobytes()] = _Nodes(nodes.number, rounds, {**rest, top: new})
    while len(_KEPT) > MAX_TREES:
        del _KEPT[next(iter(_KEPT))]
    noise = normal_of(new, entries(leaves))
    for other in ended:
        noise -= normal_of(other, entries(leaves))
    return [fresh, *add_on_grid(leaves, float(std), noise)]


def add_on_grid(
    leaves: Sequence[np.ndarray], std: float, noise: np.ndarray
) -> list[np.ndarray]:
    """Arrays plus noise for all their entries in units of ``std``, on the grid."""
    if std == 0:
        return list(leaves)
    pieces = np.split(std * noise, np.cumsum([leaf.size for leaf in leaves])[:-1])
    grid = 2.0 ** (np.floor(np.log2(std)) - GRAIN_BITS)
    noisy = []
    for leaf, piece in zip(leaves, pieces, strict=True):
        value = np.asarray(leaf, np.float64) + piece.reshape(leaf.shape)
        noisy.append((np.rint(value / grid) * grid).astype(leaf.dtype))
    return noisy


def normal_of(secret: bytes, count: int) -> np.ndarray:
    """Standard normal numbers, a function of the secret.

    From the coordinates whose update is known one could find the state of a common
    generator, and with it the noise of all others: SHAKE-256 is one-way.
    """
    pairs = -(-count // 2)
    stream = hashlib.shake_256(secret).digest(16 * pairs)
    bits = np.frombuffer(stream, np.uint64).reshape(2, pairs)
    radius, angle = ((bits >> np.uint64(11)) + 0.5) / 2.0**53
    radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def new_secret() -> bytes:
    """Bits of the operating system for the noise of one node or round."""
    return secrets.token_bytes(32)


def on_host(
    function: Callable[..., list[np.ndarray]],
    more: list[jax.Array],
    leaves: Sequence[jax.Array],
    *arguments: Any,
) -> list[jax.Array]:
    """``function(*arguments, *leaves)`` on the host; it returns such arrays again.

    JAX copies a large argument in a thread of a pool, for which the function waits. On
    CPUs with as many devices as threads every thread may be in such a function, and
    none is left to copy: a leaf travels in pieces that are copied at once.

    Args:
        function: of arrays; it returns those like ``more``, then those like the leaves.
        more: arrays of the shapes that come before the leaves.
        leaves: the last arguments.
        *arguments: the first ones.
    """
    counts = [
        max(1, -(-leaf.size * leaf.dtype.itemsize // PIECE_BYTES)) for leaf in leaves
    ]

    shapes = [leaf.shape for leaf in leaves]

    def whole(first: list[Any], *pieces: jax.Array) -> list[np.ndarray]:
        rest = iter(pieces)
        joined = [
            np.concatenate([np.asarray(next(rest)) for _ in range(count)])
            for count in counts
        ]
        both = zip(joined, shapes, strict=True)
        return function(*first, *(flat.reshape(shape) for flat, shape in both))

    pieces = [
        piece
        for leaf, count in zip(leaves, counts, strict=True)
        for piece in jnp.array_split(leaf.reshape(-1), count)
    ]
    returned = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*more, *leaves)]
    return io_callback(whole, returned, list(arguments), *pieces)


def new_name() -> np.ndarray:
    """A name that nobody can guess, for what a process keeps to itself."""
    return np.frombuffer(secrets.token_bytes(NO_NAME.nbytes), NO_NAME.dtype)


def entries(leaves: Sequence[np.ndarray]) -> int:
    """The number of entries of all arrays."""
    return sum(leaf.size for leaf in leaves)

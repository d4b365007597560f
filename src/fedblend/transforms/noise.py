# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise for privacy: from the operating system's entropy, or from a key.

Whoever can draw the noise again subtracts it. Noise ``"system"`` is a function of bits
that the operating system, or a generator that it has seeded, draws for it. They stay in
the memory of this process: no key, state, message, checkpoint or result has them. The
noise is added where the
step of the server or client is computed, also in compiled programs::

    y <- round((x + std w) / grid) grid,   w made of this and earlier g = N(0, 1)
    grid = 2^(floor(log2 std) - GRAIN_BITS)

x is the value as the device computed it, the sum is in float64, and y is then rounded
to the type of x. A mechanism with real numbers, rounded to a grid that depends on the
noise's scale alone, is as private as the mechanism: rounding comes after the noise.
Low bits of y, from which Mironov read x, are those of the grid. g is made of uniform
numbers of 52 bits, and at most 8.6 in size; docs/privacy.md says what is not covered.
Bits of independent noise are those of OpenSSL's generator on a CPU, and of ChaCha20's
key stream on other devices; noise that is kept over rounds is made on the host, from
SHAKE-256.

Noise from a key is reproducible, and protects nobody from those who know the seed.

Reference: Mironov, "On significance of the least significant bits for differential
privacy", CCS 2012; Box, Muller, "A note on the generation of random normal deviates",
1958; Nir, Langley, "ChaCha20 and Poly1305 for IETF protocols", RFC 8439.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import factorial, prod
from ssl import RAND_bytes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from scipy.special import ndtri

from fedblend.core import Key, PyTree

SOURCES = ("system", "seed")
"""Where noise may come from."""
GRAIN_BITS = 10
"""The grid of noisy values is so many powers of two finer than the noise."""
PIECE_BYTES = 2**16
"""Of an argument of a function on the host; JAX copies up to 100 KB at once."""


def add_noise(tree: PyTree, std: float | jax.Array, key: Key | None) -> PyTree:
    """The tree plus independent Gaussian noise of this standard deviation.

    Args:
        tree: of arrays.
        std: in the tree's own unit.
        key: the noise is a function of it; from the operating system if None.
    """
    if key is None:
        return add_secret_noise(tree, std)
    leaves, structure = jax.tree.flatten(tree)
    noisy = [
        leaf
        + jnp.asarray(std, leaf.dtype) * jax.random.normal(own, leaf.shape, leaf.dtype)
        for leaf, own in zip(leaves, jax.random.split(key, len(leaves)), strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)


Told = tuple[jax.Array, Callable[[np.ndarray], None]]
"""A number, and what the host calls with those of all clients of a draw."""


def add_secret_noise(
    tree: PyTree, std: float | jax.Array, told: Told | None = None
) -> PyTree:
    """The tree plus noise of the operating system, on the grid.

    Args:
        tree: of arrays.
        std: in the tree's own unit; 0 leaves the tree as it is.
        told: what the host is told; the draw is then slower.
    """
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    words = _secret_words(tree, 8 * -(-int(ends[-1]) // 4), told)
    with jax.enable_x64(True):
        scale = lax.convert_element_type(std, jnp.float64)
        # Exactly a power of two, as scale is its mantissa, in [1/2, 1), times one.
        grid = scale / jnp.frexp(scale)[0] * 2.0 ** -(GRAIN_BITS + 1)
        # What a loop computes XLA does not compute again, entry by entry, within what
        # reads it.
        pairs = lax.map(_normal, words.reshape(2, -1))
        noise = jnp.concatenate([one.reshape(-1) for one in pairs])
        pieces = jnp.split(noise[: ends[-1]], ends[:-1])
        noisy = [
            lax.convert_element_type(leaf, jnp.float64)
            + scale * piece.reshape(leaf.shape)
            for leaf, piece in zip(leaves, pieces, strict=True)
        ]
        finer = 1 / grid
        noisy = [
            lax.convert_element_type(jnp.round(one * finer) * grid, leaf.dtype)
            for leaf, one in zip(leaves, noisy, strict=True)
        ]
    some = jnp.asarray(std) > 0
    noisy = [
        jnp.where(some, one, leaf) for leaf, one in zip(leaves, noisy, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)


def _secret_words(tree: PyTree, count: int, told: Told | None) -> jax.Array:
    """So many words that nobody can guess, new in every call, step and replica.

    On a CPU they are those of OpenSSL's generator. Other devices get a key of eight
    words, and make them.

    Args:
        tree: what gets the noise; where it is mapped, each of it has its own words.
        count: a multiple of 8.
        told: what the host is told.
    """
    on_cpu = jax.default_backend() == "cpu"
    from_host = count if on_cpu else 8
    token, tell = (jnp.zeros(()), None) if told is None else told

    def draw(shape: tuple[int, ...], *tokens: np.ndarray) -> np.ndarray:
        for some in tokens:
            tell(np.asarray(some))  # pyright: ignore[reportOptionalCall]
        left = 4 * prod(shape)
        sizes = [MOST_BYTES] * (left // MOST_BYTES) + [left % MOST_BYTES]
        words = b"".join(map(RAND_bytes, sizes))
        return np.frombuffer(words, np.uint32).reshape(shape)

    @jax.custom_batching.custom_vmap
    def words_of(tokens, entries):
        del entries
        wanted = jax.ShapeDtypeStruct((*tokens.shape, from_host), jnp.uint32)
        # JAX takes ten times as long for a call with an argument.
        arguments = [] if tell is None else [tokens]
        return io_callback(partial(draw, wanted.shape), wanted, *arguments)

    # One call for all clients of a step: JAX's own rule makes one for each.
    @words_of.def_vmap
    def map_words(size, batched, tokens, entries):
        both = [
            one
            if mapped
            else jnp.broadcast_to(jnp.asarray(one), (size, *jnp.shape(one)))
            for one, mapped in zip((tokens, entries), batched, strict=True)
        ]
        return words_of(*both), True

    # Entries of all leaves, so that what is mapped is seen to be.
    some = [leaf.reshape(-1)[:1].sum() for leaf in jax.tree.leaves(tree)]
    words = words_of(token, sum(some, jnp.zeros(())))
    return words if on_cpu else chacha20(words, 0, -(-count // 16)).reshape(-1)[:count]


MOST_BYTES = 2**30
"""That OpenSSL gives at once."""
CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")


def chacha20(key: jax.Array, first: int, blocks: int) -> jax.Array:
    """Blocks of ChaCha20's key stream, words [16, blocks], with a nonce of zeros.

    Args:
        key: eight words.
        first: the number of the first block.
        blocks: how many.
    """

    def word(value):
        return jnp.broadcast_to(jnp.asarray(value, jnp.uint32), (blocks,))

    numbers = first + jnp.arange(blocks, dtype=jnp.uint32)
    begin = (*map(word, CONSTANTS), *map(word, key), numbers, *map(word, (0, 0, 0)))

    def two_rounds(_, state):
        state = list(state)
        for turn in (0, 1):
            for column in range(4):
                at = [4 * row + (column + turn * row) % 4 for row in range(4)]
                quarter = _quarter_round(*(state[place] for place in at))
                for place, value in zip(at, quarter, strict=True):
                    state[place] = value
        return tuple(state)

    end = lax.fori_loop(0, 10, two_rounds, begin)
    return jnp.stack([one + other for one, other in zip(begin, end, strict=True)])


def _quarter_round(a, b, c, d):
    for left, right in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate(d ^ a, left)
        c = c + d
        b = _rotate(b ^ c, right)
    return a, b, c, d


def _rotate(word, bits: int):
    return (word << bits) | (word >> (32 - bits))


COSINE = [(-1) ** n / factorial(2 * n) for n in range(8, -1, -1)]
SINE = [(-1) ** n / factorial(2 * n + 1) for n in range(8, -1, -1)]
"""Taylor coefficients, exact in float64 up to an eighth of the circle."""


def _normal(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Pairs of standard normal numbers in float64, each of four words.

    They are Box and Muller's, sqrt(-2 log u) (cos a, sin a), with a in the eighth on
    either side of an axis, which two more bits choose.
    """
    high, low = words.reshape(2, 2, -1)
    bits = lax.convert_element_type(high, jnp.float64) * 2.0**20
    bits += lax.convert_element_type(low >> np.uint32(12), jnp.float64)
    uniform, part = (bits + 0.5) * 2.0**-52
    angle = (part - 0.5) * (np.pi / 2)
    square = angle * angle
    cosine = reduce(lambda total, one: total * square + one, COSINE, 0.0)
    sine = angle * reduce(lambda total, one: total * square + one, SINE, 0.0)
    turned, negative = low[1] & np.uint32(1) == 1, low[1] & np.uint32(2) == 2
    length = jnp.sqrt(-2 * jnp.log(uniform))
    length = jnp.where(negative, -length, length)
    one = jnp.where(turned, -sine, cosine)
    other = jnp.where(turned, cosine, sine)
    return length * one, length * other


NO_NAME = np.zeros(4, np.uint32)
"""The name of what is not kept yet."""


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
    stream = hashlib.shake_256(secret).digest(8 * count)
    bits = np.frombuffer(stream, np.uint64) >> np.uint64(12)
    return ndtri((bits + 0.5) / 2.0**52)


def new_secret() -> bytes:
    """Bits of the operating system for the noise of one round."""
    return secrets.token_bytes(32)


def call_host(
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

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressors that send every entry in few bits: dithering, natural, sign, int8.

They compute in float32 at least. An entry that is not finite makes the decoded vector
not finite either, so that the receiver can refuse it.
"""

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedblend.checks import Number, gate
from fedblend.compress.compressor import Compressor, pack, unpack, width_of
from fedblend.core import Key, Shard

_MOST_LEVELS = 2**24
"""Integers up to this one are exact in float32."""


class Scaled(NamedTuple):
    """A scale, and every entry as a packed integer."""

    scale: jax.Array
    codes: jax.Array


@gate()
def dithering(
    levels: Annotated[int, Number(least=1, most=_MOST_LEVELS, whole=True)],
) -> Compressor:
    """Random dithering (QSGD): entries rounded at random to multiples of |x|/levels.

    Unbiased, omega = min(dim/levels^2, sqrt(dim)/levels). A client sends a sign and a
    level for each entry, and the norm.

    Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient
    SGD via gradient quantization and encoding", NeurIPS 2017, arXiv:1610.02132.
    """
    width = 1 + width_of(levels)

    def compress(vector: jax.Array, key: Key, shard: Shard | None) -> Scaled:
        vector = _wide(vector)
        largest = jnp.abs(vector).max(initial=0)
        # Squares of very small or large entries would leave the range of floats.
        norm = largest * jnp.linalg.norm(vector / _not_zero(largest))
        level = _round_at_random(jnp.abs(vector) / _not_zero(norm) * levels, key)
        level = jnp.minimum(level, levels)  # rounding of the norm may pass it
        return Scaled(norm, pack(_add_sign(level, vector, width), width))

    def decompress(payload: Scaled, dim: int, key, client) -> jax.Array:
        codes = unpack(payload.codes, dim, width)
        size = (codes & ((1 << (width - 1)) - 1)).astype(payload.scale.dtype)
        value = size / levels * payload.scale
        return jnp.where((codes >> (width - 1)) == 1, -value, value)

    def omega(dim: int) -> float:
        return min(dim / levels**2, math.sqrt(dim) / levels)

    return _make_unbiased(compress, decompress, omega, f"dithering({levels})")


def natural() -> Compressor:
    """Natural compression: entries rounded at random to a power of two.

    Unbiased, omega = 1/8; sends the sign and exponent of a float32, nine bits an entry.
    An entry below the smallest normal number, 2^-126, becomes zero, and one above 2^127
    becomes 2^127.

    Reference: Horváth, Ho, Horváth, Sahu, Canini, Richtárik, "Natural compression for
    distributed deep learning", 2019, arXiv:1905.10988.
    """
    width, bias, largest, infinite = 9, 127, 254, 255

    def compress(vector: jax.Array, key: Key, shard: Shard | None) -> jax.Array:
        size = jnp.abs(_wide(vector))
        mantissa, exponent = jnp.frexp(size)  # in [1/2, 1)
        up = jax.random.uniform(key, size.shape, size.dtype) < 2 * mantissa - 1
        power = exponent + up.astype(exponent.dtype) - 1 + bias
        code = jnp.where(size < 2.0 ** (1 - bias), 0, jnp.minimum(power, largest))
        code = jnp.where(jnp.isfinite(size), code, infinite)
        return pack(_add_sign(code, vector, width), width)

    def decompress(payload: jax.Array, dim: int, key, client) -> jax.Array:
        codes = unpack(payload, dim, width)
        return jax.lax.bitcast_convert_type(codes << 23, jnp.float32)

    return _make_unbiased(compress, decompress, lambda dim: 1 / 8, "natural")


def sign() -> Compressor:
    """Signs times the mean absolute value: biased, delta >= 1/dim, one bit an entry.

    Reference: Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: compressed
    optimization for non-convex problems", ICML 2018, arXiv:1802.04434; with the scale
    of Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD and other
    gradient compression schemes", ICML 2019, arXiv:1901.09847.
    """

    def compress(vector: jax.Array, key: Key, shard: Shard | None) -> Scaled:
        return Scaled(jnp.abs(_wide(vector)).mean(), pack(vector >= 0, 1))

    def decompress(payload: Scaled, dim: int, key, client) -> jax.Array:
        positive = unpack(payload.codes, dim, 1)
        return jnp.where(positive == 1, payload.scale, -payload.scale)

    return Compressor(compress, decompress, delta=lambda dim: 1 / dim, name="sign")


def int8() -> Compressor:
    """Entries rounded at random to 255 even steps up to the largest absolute value.

    Unbiased, omega = dim / (4 * 127^2); sends a byte an entry, and the largest absolute
    value.
    """
    most = 127

    def compress(vector: jax.Array, key: Key, shard: Shard | None) -> Scaled:
        vector = _wide(vector)
        scale = jnp.abs(vector).max(initial=0)
        level = _round_at_random(vector / _not_zero(scale) * most, key)
        return Scaled(scale, jnp.clip(level, -most, most).astype(jnp.int8))

    def decompress(payload: Scaled, dim: int, key, client) -> jax.Array:
        return payload.codes.astype(payload.scale.dtype) / most * payload.scale

    def omega(dim: int) -> float:
        return dim / (4 * most**2)

    return _make_unbiased(compress, decompress, omega, "int8")


def _make_unbiased(
    compress: Callable, decompress: Callable, omega: Callable[[int], float], name: str
) -> Compressor:
    """The compressor; an unbiased one also contracts, by 1 - omega."""
    return Compressor(compress, decompress, omega, lambda dim: 1 - omega(dim), name)


def _wide(vector: jax.Array) -> jax.Array:
    return vector.astype(jnp.promote_types(vector.dtype, jnp.float32))


def _round_at_random(values: jax.Array, key: Key) -> jax.Array:
    """One of the two nearest integers, unbiased."""
    below = jnp.floor(values)
    draws = jax.random.uniform(key, values.shape, values.dtype)
    return below + (draws < values - below).astype(values.dtype)


def _not_zero(scale: jax.Array) -> jax.Array:
    return jnp.where(scale > 0, scale, 1)


def _add_sign(code: jax.Array, vector: jax.Array, width: int) -> jax.Array:
    """The codes with the sign of each entry in the highest bit."""
    negative = (vector < 0).astype(jnp.uint32) << (width - 1)
    return code.astype(jnp.uint32) | negative

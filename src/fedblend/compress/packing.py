# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Whole numbers of a few bits, packed into bytes without gaps."""

import jax
import jax.numpy as jnp


def width_of(largest: int) -> int:
    """Bits that hold the numbers from 0 to ``largest``."""
    return max(int(largest).bit_length(), 1)


def packed_size(count: int, width: int) -> int:
    """Bytes that ``count`` numbers of ``width`` bits take."""
    return (count * width + 7) // 8


def pack(numbers: jax.Array, width: int) -> jax.Array:
    """Numbers below ``2**width`` as bytes, the highest bit of each first."""
    places = jnp.arange(width - 1, -1, -1, dtype=jnp.uint32)
    bits = (numbers.astype(jnp.uint32)[:, None] >> places[None, :]) & 1
    return jnp.packbits(bits.reshape(-1).astype(jnp.uint8))


def unpack(packed: jax.Array, count: int, width: int) -> jax.Array:
    """The numbers that ``pack`` put into bytes."""
    bits = jnp.unpackbits(packed, count=count * width).reshape(count, width)
    places = jnp.arange(width - 1, -1, -1, dtype=jnp.uint32)
    return (bits.astype(jnp.uint32) << places[None, :]).sum(axis=1, dtype=jnp.uint32)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A convolution that stays fast when every client has its own weights.

Training many clients at once is a ``vmap`` over images *and* weights. XLA turns its own
convolution into a grouped one, which is slow. This one is one matrix product over all
shifted copies of the image. ``benchmarks/convolutions.py`` compares it with others.

On a GPU, squares of ``tile`` x ``tile`` results share a row of the product. Such a row
sees the image once, where single results would see most of it several times over, and
is multiplied with all places that the kernel has in it, zeros elsewhere: fewer entries
are read, and more multiplied. Products on a GPU wait for memory where there are few
outputs, and ``tile_size`` weighs the two.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

Padding = Literal["VALID", "SAME"]
Product = Callable[[jax.Array, jax.Array], jax.Array]

ENTRY_COST = 200
"""Multiplications that cost as much as an entry that a product reads, on an H200."""


def convolution(
    images: jax.Array,
    weight: jax.Array,
    *,
    stride: int = 1,
    padding: Padding = "VALID",
    product: Product = jnp.matmul,
) -> jax.Array:
    """The convolution of [rows, height, width, channels].

    Args:
        images: to convolve.
        weight: [height, width, channels, outputs].
        stride: of both axes.
        padding: "VALID" for none, "SAME" for ``ceil(size / stride)`` places.
        product: of matrices.
    """
    high, wide, channels, outputs = weight.shape
    edges = [
        _edges(*one, stride, padding)
        for one in zip(images.shape[1:3], (high, wide), strict=True)
    ]
    if any(map(any, edges)):
        images = jnp.pad(images, ((0, 0), *edges, (0, 0)))
    rows = _windows(images.shape[1], high, stride)
    columns = _windows(images.shape[2], wide, stride)
    places = [len(range(*one[0].indices(one[0].stop))) for one in (rows, columns)]
    if stride == 1 and high == wide:
        tile = tile_size(high, places, outputs)
        if tile > 1:
            return _tiles(images, weight, tile, product)
    shifted = [images[:, down, across] for down in rows for across in columns]
    flat = weight.reshape(high * wide * channels, outputs)
    found = _flat_product(jnp.concatenate(shifted, axis=-1), flat, product)
    return found.reshape(images.shape[0], *places, outputs)


def _edges(size: int, kernel: int, stride: int, padding: Padding) -> tuple[int, int]:
    """The padding before and after an axis."""
    if padding == "VALID":
        return 0, 0
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _windows(size: int, kernel: int, stride: int) -> list[slice]:
    """What each place of a kernel sees of a padded axis."""
    last = (size - kernel) // stride * stride
    return [slice(place, place + last + 1, stride) for place in range(kernel)]


def tile_size(kernel: int, places: Sequence[int], outputs: int) -> int:
    """Results along an axis that share a row of the product, 1 on a CPU.

    Args:
        kernel: size of the kernel, along both axes.
        places: of results along each axis; tiles fill them without a rest.
        outputs: channels of a result.
    """
    if jax.default_backend() == "cpu":
        return 1
    fitting = math.gcd(kernel - 1, *places)
    sizes = [size for size in range(1, fitting + 1) if fitting % size == 0] or [1]
    return min(sizes, key=lambda size: _tile_cost(kernel, size, outputs))


def _tile_cost(kernel: int, tile: int, outputs: int) -> int:
    """What a result costs, in multiplications of one channel."""
    reach = (tile + kernel - 1) // tile
    return reach**2 * (ENTRY_COST + tile**2 * outputs)


def _flat_product(rows, matrix, product):
    """The product of rows; on a GPU with one axis of them, and by itself.

    For the gradient of the matrix XLA then transposes them in the product, where it
    would copy all of them in another order otherwise; and it neither collects the rows
    twice, for both products that need them, nor adds a bias in the product, for which
    it would repeat the bias as often as there are rows.
    """
    if jax.default_backend() == "cpu":
        return product(rows, matrix)
    rows = jax.lax.optimization_barrier(rows.reshape(-1, rows.shape[-1]))
    return jax.lax.optimization_barrier(product(rows, matrix))


def _tiles(images, weight, tile, product):
    """The convolution without stride, by tiles that divide kernel - 1 and results."""
    count, height, width, channels = images.shape
    kernel, outputs = weight.shape[0], weight.shape[-1]
    reach = (tile + kernel - 1) // tile  # blocks of the image that a tile sees
    high, wide = height // tile, width // tile
    down, across = high - reach + 1, wide - reach + 1
    blocks = images.reshape(count, high, tile, wide, tile, channels).swapaxes(2, 3)
    blocks = blocks.reshape(count, high, wide, tile * tile * channels)
    shifted = [
        blocks[:, y : y + down, x : x + across]
        for y in range(reach)
        for x in range(reach)
    ]
    free = tile - 1
    placed = jnp.stack(
        [
            jnp.pad(weight, ((y, free - y), (x, free - x), (0, 0), (0, 0)))
            for y in range(tile)
            for x in range(tile)
        ],
        axis=-2,
    )
    placed = placed.reshape(reach, tile, reach, tile, channels, tile**2 * outputs)
    flat = placed.swapaxes(1, 2).reshape(-1, tile**2 * outputs)
    found = _flat_product(jnp.concatenate(shifted, axis=-1), flat, product)
    found = found.reshape(count, down, across, tile, tile, outputs).swapaxes(2, 3)
    return found.reshape(count, down * tile, across * tile, outputs)

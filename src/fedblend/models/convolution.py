# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A convolution that stays fast when every client has its own weights.

Training many clients at once is a ``vmap`` over images *and* weights. XLA turns its own
convolution into a grouped one, which is slow. ``WAYS`` has the same convolution three
times: "direct" is XLA's; "patches" is one matrix product over all shifted copies of the
image; "columns" makes copies shifted across only, and sums a product for each row of
the kernel, with a part of the memory. ``benchmarks/convolutions.py`` compares them.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

Way = Literal["direct", "patches", "columns"]
Padding = Literal["VALID", "SAME"]
Product = Callable[[jax.Array, jax.Array], jax.Array]


def convolution(
    images: jax.Array,
    weight: jax.Array,
    *,
    stride: int = 1,
    padding: Padding = "VALID",
    way: Way = "patches",
    product: Product = jnp.matmul,
) -> jax.Array:
    """The convolution of [rows, height, width, channels].

    Args:
        images: to convolve.
        weight: [height, width, channels, outputs].
        stride: of both axes.
        padding: "VALID" for none, "SAME" for ``ceil(size / stride)`` places.
        way: how it is computed.
        product: of matrices, which "direct" does not use.
    """
    if way != "direct":
        edges = [
            _edges(*one, stride, padding)
            for one in zip(images.shape[1:3], weight.shape[:2], strict=True)
        ]
        if any(map(any, edges)):
            images = jnp.pad(images, ((0, 0), *edges, (0, 0)))
    return WAYS[way](images, weight, stride, padding, product)


def _edges(size: int, kernel: int, stride: int, padding: Padding) -> tuple[int, int]:
    """The padding before and after an axis."""
    if padding == "VALID":
        return 0, 0
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def _direct(images, weight, stride, padding, product):
    del product
    return jax.lax.conv_general_dilated(
        images,
        weight,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _windows(size: int, kernel: int, stride: int) -> list[slice]:
    """What each place of a kernel sees of a padded axis."""
    last = (size - kernel) // stride * stride
    return [slice(place, place + last + 1, stride) for place in range(kernel)]


def _patches(images, weight, stride, padding, product):
    del padding
    high, wide, channels, outputs = weight.shape
    shifted = [
        images[:, down, across]
        for down in _windows(images.shape[1], high, stride)
        for across in _windows(images.shape[2], wide, stride)
    ]
    flat = weight.reshape(high * wide * channels, outputs)
    return product(jnp.concatenate(shifted, axis=-1), flat)


def _columns(images, weight, stride, padding, product):
    del padding
    high, wide, channels, outputs = weight.shape
    windows = _windows(images.shape[2], wide, stride)
    joined = jnp.concatenate([images[:, :, across] for across in windows], axis=-1)
    flat = weight.reshape(high, wide * channels, outputs)
    rows = _windows(images.shape[1], high, stride)
    total = product(joined[:, rows[0]], flat[0])
    for down, part in zip(rows[1:], flat[1:], strict=True):
        total += product(joined[:, down], part)
    return total


WAYS: dict[Way, Callable[..., jax.Array]] = {
    "direct": _direct,
    "patches": _patches,
    "columns": _columns,
}

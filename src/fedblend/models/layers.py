# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The layers the models are made of: affine maps, convolutions and pooling.

Training many clients at once is a ``vmap`` over inputs *and* weights. XLA turns such a
convolution into a grouped one, which is slow on a CPU. The convolution here is
therefore a matrix product over the concatenated shifted copies of the image, which
stays a batched product under ``vmap``. With ten clients, batches of 20 and the networks
of ``cnn``, forward and backward pass take about half the time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from fedblend.core import Key


class Affine(NamedTuple):
    """``inputs @ weight.T + bias``.

    ``weight`` is [outputs, inputs]: with few outputs a step on a CPU is about 1.5 times
    as fast as with the transpose.
    """

    weight: jax.Array
    bias: jax.Array | None


class Kernel(NamedTuple):
    """A convolution; ``weight`` is [height, width, channels, outputs]."""

    weight: jax.Array
    bias: jax.Array


def affine(start: Initializer, key: Key, inputs: int, outputs: int, dtype) -> Affine:
    """A layer with weights drawn by ``start``, and a bias of zero."""
    weight = start(key, (inputs, outputs), dtype).T
    return Affine(weight, jnp.zeros((outputs,), dtype))


def kernel(start: Initializer, key: Key, shape: tuple[int, ...], dtype) -> Kernel:
    """A convolution with weights drawn by ``start``, and a bias of zero."""
    return Kernel(start(key, shape, dtype), jnp.zeros(shape[-1:], dtype))


def flatten(inputs: jax.Array, dtype) -> jax.Array:
    """Every row as one vector."""
    return jnp.reshape(inputs, (inputs.shape[0], -1)).astype(dtype)


def linear(layer: Affine, inputs: jax.Array) -> jax.Array:
    """The affine map over the last axis."""
    outputs = inputs @ layer.weight.T
    return outputs if layer.bias is None else outputs + _aligned(layer.bias, outputs)


def convolve(layer: Kernel, images: jax.Array) -> jax.Array:
    """The convolution of [rows, height, width, channels], without padding."""
    high, wide, channels, outputs = layer.weight.shape
    rows, columns = images.shape[1] - high + 1, images.shape[2] - wide + 1
    shifted = [
        images[:, down : down + rows, right : right + columns]
        for down in range(high)
        for right in range(wide)
    ]
    weight = layer.weight.reshape(high * wide * channels, outputs)
    product = jnp.concatenate(shifted, axis=-1) @ weight
    return product + _aligned(layer.bias, product)


def pool(images: jax.Array) -> jax.Array:
    """The maximum of every square of 2x2; an odd last row or column is left out."""
    count, rows, columns, channels = images.shape
    even = images[:, : rows // 2 * 2, : columns // 2 * 2]
    squares = even.reshape(count, rows // 2, 2, columns // 2, 2, channels)
    return squares.max(axis=(2, 4))


def _aligned(bias: jax.Array, outputs: jax.Array) -> jax.Array:
    return bias.reshape((1,) * (outputs.ndim - 1) + bias.shape)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""PFLlib's network of four layers, written so that a GPU trains many of them at once.

``5x5 to 32, pool, 5x5 to 64, pool, 512, scores`` with ReLU and without padding: 582,026
parameters for 28x28 and 10 classes. Weights and biases start as PyTorch's layers do,
uniform within ``1 / sqrt(inputs of a unit)``.

Many clients are trained by a ``vmap`` over images *and* weights, for which
``fedblend.models.convolution`` is written.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from fedblend.core import Key
from fedblend.models.convolution import convolution
from fedblend.models.feedforward import Affine, Cnn, Kernel, flatten, pool
from fedblend.models.model import Model, join_halves

Precision = Literal["float32", "tf32", "bfloat16"]

KERNEL, CHANNELS, HIDDEN, FEATURES = 5, (32, 64), 512, 4 * 4 * 64
ROWS = 256
"""Rows that are computed at once."""


def _product(precision: Precision) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """``inputs @ weight``; sums are float32 in every precision.

    "tf32" is the default of JAX: on a CPU it is float32.
    """

    def product(inputs: jax.Array, weight: jax.Array) -> jax.Array:
        if precision == "bfloat16":
            inputs, weight = inputs.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
            return jnp.matmul(inputs, weight, preferred_element_type=jnp.float32)
        exact = jax.lax.Precision.HIGHEST if precision == "float32" else None
        return jnp.matmul(inputs, weight, precision=exact)

    return product


def network(precision: Precision = "tf32", classes: int = 10) -> Model:
    """The network for images of 28x28.

    Args:
        precision: of matrix products.
        classes: number of scores.
    """
    product = _product(precision)
    convolve = partial(convolution, product=product)
    first, second = CHANNELS

    def init(key: Key) -> Cnn:
        keys = [jax.random.fold_in(key, place) for place in range(4)]
        return Cnn(
            Kernel(*_uniform(keys[0], (KERNEL, KERNEL, 1, first))),
            Kernel(*_uniform(keys[1], (KERNEL, KERNEL, first, second))),
            _affine(keys[2], FEATURES, HIDDEN),
            (),
            _affine(keys[3], HIDDEN, classes),
        )

    def features(params: Cnn, images: jax.Array) -> jax.Array:
        images = jnp.reshape(images, (len(images), 28, 28, 1)).astype(jnp.float32)
        if len(images) <= ROWS:
            return hidden(params, images)
        # All rows of a client: some at a time, since the copies take 200 kB a row.
        padded = jnp.pad(images, ((0, -len(images) % ROWS), (0, 0), (0, 0), (0, 0)))
        blocks = padded.reshape(-1, ROWS, *images.shape[1:])
        several = jax.checkpoint(lambda block: hidden(params, block))
        return jax.lax.map(several, blocks).reshape(-1, HIDDEN)[: len(images)]

    def hidden(params: Cnn, here: jax.Array) -> jax.Array:
        for layer in params[:2]:
            # Pooling commutes with adding a bias and with ReLU: both are cheaper after.
            here = pool(convolve(here, layer.weight))
            here = jax.nn.relu(_biased(here, layer.bias))
        here = flatten(here, jnp.float32)
        here = _biased(product(here, params.hidden.weight.T), params.hidden.bias)
        return jax.nn.relu(here)

    def head(params: Cnn, features: jax.Array) -> jax.Array:
        return _biased(product(features, params.last.weight.T), params.last.bias)

    return join_halves(init, features, head)


def _biased(outputs: jax.Array, bias: jax.Array | None) -> jax.Array:
    assert bias is not None
    return outputs + bias.reshape((1,) * (outputs.ndim - 1) + bias.shape)


def _uniform(key: Key, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Weights [..., inputs, outputs] and biases as PyTorch draws them."""
    bound = 1 / math.sqrt(math.prod(shape[:-1]))
    weight, bias = (jax.random.fold_in(key, place) for place in range(2))
    return (
        jax.random.uniform(weight, shape, jnp.float32, -bound, bound),
        jax.random.uniform(bias, shape[-1:], jnp.float32, -bound, bound),
    )


def _affine(key: Key, inputs: int, outputs: int) -> Affine:
    weight, bias = _uniform(key, (inputs, outputs))
    return Affine(weight.T, bias)

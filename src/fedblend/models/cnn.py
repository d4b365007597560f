# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Two convolutional networks: APFL's, and the larger one used for EMNIST.

Both are ``convolution, convolution, hidden layer, scores`` with ReLU, without padding
and with stride 1; pooling takes the maximum of squares of 2x2. Images are
[rows, height, width, channels], or [rows, height, width] where there is one channel.

References:
    Deng, Kamani, Mahdavi. Adaptive Personalized Federated Learning. 2020.
    https://arxiv.org/abs/2003.13461
    Reddi et al. Adaptive Federated Optimization. ICLR 2021.
    https://arxiv.org/abs/2003.00295
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import initializers

from fedblend.checks import COUNT, gate
from fedblend.models.layers import (
    Affine,
    Kernel,
    affine,
    convolve,
    flatten,
    kernel,
    linear,
    pool,
)
from fedblend.models.model import Model, Shape, image, model


class Cnn(NamedTuple):
    """The four layers, in order."""

    first: Kernel
    second: Kernel
    hidden: Affine
    last: Affine


class _Plan(NamedTuple):
    """The settings in which the two networks differ."""

    name: str
    kernel: int
    channels: tuple[int, int]
    pooled: tuple[bool, bool]
    hidden: int


_APFL = _Plan("cnn", 5, (20, 50), (True, True), 512)
_LARGE = _Plan("large_cnn", 3, (32, 64), (False, True), 128)


@model("APFL's network: convolutions 20-50, hidden 512", image)
@gate(classes=COUNT)
def cnn(shape: Shape, classes: int, *, dtype=jnp.float32) -> Model:
    """APFL's network: 5x5 to 20, pool, 5x5 to 50, pool, 512, scores.

    The paper says "2 convolution layers, followed by 2 fully connected layers"; widths,
    kernels, the missing padding and the pooling are those of its authors' code, which
    declares dropout and does not use it. 440 812 parameters for 28x28x1 and 10
    classes, 672 212 for 32x32x3.

    Example:
        >>> model = cnn((28, 28), 10)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.ones((2, 784))).shape
        (2, 10)
    """
    return _network(_APFL, shape, classes, dtype)


@model("EMNIST's: convolutions 32-64, 128", image)
@gate(classes=COUNT)
def large_cnn(shape: Shape, classes: int, *, dtype=jnp.float32) -> Model:
    """The larger network: 3x3 to 32, 3x3 to 64, pool, 128, scores.

    The EMNIST network of Reddi et al., which FLIX uses too, without its dropout.
    1 626 442 parameters (1.63 million) for CIFAR's 32x32x3 and 10 classes; 1 199 882
    for 28x28x1 and 10 classes, 1 206 590 for 62.
    """
    return _network(_LARGE, shape, classes, dtype)


def _network(plan: _Plan, shape: Shape, classes: int, dtype) -> Model:
    image = _image(plan, shape)
    features = math.prod(_features(plan, image))
    he, glorot = initializers.he_normal(), initializers.glorot_uniform()
    size, (first, second) = plan.kernel, plan.channels

    def init(key):
        keys = [jax.random.fold_in(key, place) for place in range(4)]
        return Cnn(
            kernel(he, keys[0], (size, size, image[2], first), dtype),
            kernel(he, keys[1], (size, size, first, second), dtype),
            affine(he, keys[2], features, plan.hidden, dtype),
            affine(glorot, keys[3], plan.hidden, classes, dtype),
        )

    def apply(params, rows):
        dtype = params.last.weight.dtype
        here = jnp.reshape(rows, (rows.shape[0], *image)).astype(dtype)
        for layer, pooled in zip(params[:2], plan.pooled, strict=True):
            here = convolve(layer, here)
            # Pooling commutes with ReLU, which is cheaper afterwards.
            here = jax.nn.relu(pool(here) if pooled else here)
        here = jax.nn.relu(linear(params.hidden, flatten(here, dtype)))
        return linear(params.last, here)

    return Model(init, apply)


def _image(plan: _Plan, shape: Shape) -> tuple[int, int, int]:
    """(height, width, channels) of rows that are large enough images."""
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{plan.name}: rows of shape {tuple(shape)} are no images, which are "
            "(height, width) or (height, width, channels)"
        )
    height, width, channels = (*shape, 1)[:3]
    sizes = {"height": height, "width": width, "channels": channels}
    for name, size in sizes.items():
        COUNT(f"{plan.name}: {name}", size)
    if min(_features(plan, (height, width, channels))) < 1:
        raise ValueError(
            f"{plan.name}: an image of {height}x{width} is too small for two "
            f"{plan.kernel}x{plan.kernel} convolutions and pooling"
        )
    return height, width, channels


def _features(plan: _Plan, image: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape of a row after both convolutions."""
    height, width = image[:2]
    for pooled in plan.pooled:
        height, width = height - plan.kernel + 1, width - plan.kernel + 1
        if pooled:
            height, width = height // 2, width // 2
    return height, width, plan.channels[1]

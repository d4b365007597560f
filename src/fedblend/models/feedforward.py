# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Feedforward networks, from linear models to convolutional ones, and their layers.

*Linear models* start at zero: their objectives are convex, with the same initial point
for all clients.

*The multilayer perceptron* has two hidden layers of 200 with ReLU by default, as in
APFL's experiments, without the dropout and batch normalization of its authors' code,
which the paper does not have; ``dropout`` and ``norm = "batch"`` add them.

*The convolutional networks*, APFL's and the larger one used for EMNIST, are
``convolution, convolution, hidden layer, scores`` with ReLU, without padding and with
stride 1; pooling takes the maximum of squares of 2x2. Images are
[rows, height, width, channels], or [rows, height, width] where there is one channel.

Convolutions are matrix products over shifted copies of the image, see ``convolution``.

References:
    Deng, Kamani, Mahdavi. Adaptive Personalized Federated Learning. 2020.
    https://arxiv.org/abs/2003.13461
    Reddi et al. Adaptive Federated Optimization. ICLR 2021.
    https://arxiv.org/abs/2003.00295
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jax.nn.initializers import Initializer

from fedblend.batch_statistics import Statistic, standardize
from fedblend.checks import COUNT, Instance, Number, gate, words
from fedblend.core import Key
from fedblend.errors import UserError
from fedblend.losses import warn_without_key
from fedblend.mixing import Apply
from fedblend.models.convolution import convolution
from fedblend.models.model import Model, Shape, flat, image, join_halves, model

Normal = bool | Literal["batch"]
"""Whether layers are normalized: each row, or the rows of a batch together."""


def _norm_rule(key: str, value: Any) -> Normal:
    """The rule of ``checks`` for whether layers are normalized, and by what."""
    if isinstance(value, str) and value == "batch":
        return value
    return Instance((bool, np.bool_), 'True, False or "batch"')(key, value)


DROPOUT = Number(least=0, below=1)
"""The rule of ``checks`` for a rate of dropout."""
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "gelu": jax.nn.gelu,
}


class Training(NamedTuple):
    """Key and mask of a training step, None in evaluation; ``rate`` is of dropout."""

    key: Key | None = None
    mask: jax.Array | None = None
    rate: float = 0.0

    def drop(self, place: int, values: jax.Array) -> jax.Array:
        """Values of a layer, of which some are zero in training, and others larger."""
        if not self.rate:
            return values
        if self.key is None:
            warn_without_key(self.rate)
            return values
        return dropout(jax.random.fold_in(self.key, place), self.rate, values)


def dropout(key: Key, rate: float, values: jax.Array) -> jax.Array:
    """The values, each zero with the probability ``rate``; the others grow by that."""
    if rate >= 1:
        return jnp.zeros_like(values)
    kept = jax.random.bernoulli(key, 1 - rate, values.shape)
    return jnp.where(kept, values / (1 - rate), 0)


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


class Norm(NamedTuple):
    """What a normalization learns: a factor and an addend for each channel.

    One of batches has their running mean and variance, too.
    """

    scale: jax.Array
    offset: jax.Array
    mean: Statistic | None = None
    variance: Statistic | None = None


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
    return outputs if layer.bias is None else outputs + _align(layer.bias, outputs)


def convolve(layer: Kernel, images: jax.Array) -> jax.Array:
    """The convolution of [rows, height, width, channels], without padding."""
    product = convolution(images, layer.weight)
    return product + _align(layer.bias, product)


def pool(images: jax.Array) -> jax.Array:
    """The maximum of every square of 2x2; an odd last row or column is left out.

    Entries that are equally large share the derivative equally.
    """
    count, rows, columns, channels = images.shape
    even = images[:, : rows // 2 * 2, : columns // 2 * 2]
    squares = even.reshape(count, rows // 2, 2, columns // 2, 2, channels)
    return squares.max(axis=(2, 4))


def norms(widths: Sequence[int], dtype, norm: Normal = True) -> tuple[Norm, ...]:
    """Normalizations of layers of these widths; at first they neither scale nor add.

    Args:
        widths: of the layers.
        dtype: of the parameters.
        norm: True for those of rows, "batch" for those of batches, False for none.
    """
    if not norm:
        return ()
    pairs = [(jnp.ones(n, dtype), jnp.zeros(n, dtype)) for n in widths]
    if norm != "batch":
        return tuple(Norm(*pair) for pair in pairs)
    return tuple(
        Norm(one, zero, Statistic(zero), Statistic(one)) for one, zero in pairs
    )


def normalize(layer: Norm, inputs: jax.Array, training: Training) -> jax.Array:
    """By row or batch: less the mean, over the deviation; scale, offset by channel."""
    if layer.mean is not None and layer.variance is not None:
        ready = standardize(
            inputs,
            layer.mean,
            layer.variance,
            training=training.key is not None,
            mask=training.mask,
        )
        return ready * _align(layer.scale, inputs) + _align(layer.offset, inputs)
    axes = tuple(range(1, inputs.ndim))
    centered = inputs - inputs.mean(axes, keepdims=True)
    spread = jax.lax.rsqrt((centered**2).mean(axes, keepdims=True) + 1e-5)
    scaled = centered * spread * _align(layer.scale, inputs)
    return scaled + _align(layer.offset, inputs)


def _last(params, features: jax.Array) -> jax.Array:
    return linear(params.last, features)


def _align(bias: jax.Array, outputs: jax.Array) -> jax.Array:
    return bias.reshape((1,) * (outputs.ndim - 1) + bias.shape)


@model("softmax regression, starts at zero", flat, head="bias", linear=True)
@gate(inputs=COUNT, classes=COUNT)
def softmax(
    inputs: int, classes: int, *, intercept: bool = True, dtype=jnp.float32
) -> Model:
    """Softmax regression: ``scores = inputs @ weight.T + bias``, one for each class.

    Example:
        >>> import jax
        >>> model = softmax(4, 3)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jax.numpy.ones((2, 4))).shape
        (2, 3)
    """

    def init(key):
        del key
        bias = jnp.zeros((classes,), dtype) if intercept else None
        return Affine(jnp.zeros((classes, inputs), dtype), bias)

    def features(params, rows):
        return flatten(rows, params.weight.dtype)

    return join_halves(init, features, linear)


def _one_score(shape: Shape, outputs: int) -> tuple[int]:
    if outputs not in (1, 2):
        raise ValueError(
            f"logistic: {outputs} outputs, it has a single score (1 output, 2 classes)"
        )
    return flat(shape, outputs)[:1]


@model("logistic regression, a single score", _one_score, head="bias", linear=True)
@gate(inputs=COUNT)
def logistic(inputs: int, *, intercept: bool = True, dtype=jnp.float32) -> Model:
    """Logistic regression: a single score for each row, positive for class 1.

    Example:
        >>> import jax
        >>> model = logistic(4)
        >>> model.apply(model.init(jax.random.key(0)), jax.numpy.ones((2, 4))).shape
        (2,)
    """
    scores = softmax(inputs, 1, intercept=intercept, dtype=dtype)

    def head(params, features):
        return linear(params, features)[:, 0]

    return join_halves(scores.init, cast(Apply, scores.features), head)


class Mlp(NamedTuple):
    """The hidden layers, their normalizations if any, and the last layer."""

    hidden: tuple[Affine, ...]
    norm: tuple[Norm, ...]
    last: Affine


@model("multilayer perceptron, 200-200 with ReLU", flat)
@gate(
    inputs=COUNT,
    outputs=COUNT,
    activation=words(*ACTIVATIONS),
    norm=_norm_rule,
    dropout=DROPOUT,
)
def mlp(
    inputs: int,
    outputs: int,
    *,
    hidden: Sequence[int] = (200, 200),
    activation: str = "relu",
    norm: Normal = False,
    dropout: float = 0.0,
    dtype=jnp.float32,
) -> Model:
    """A multilayer perceptron.

    Args:
        inputs: number of entries of a row.
        outputs: number of scores or values of a row.
        hidden: widths of the hidden layers; an empty list makes the model linear.
        activation: "relu", "tanh", "sigmoid", "softplus" or "gelu".
        norm: True for layer normalization of the hidden layers, before the activation;
            "batch" for batch normalization.
        dropout: part of the hidden features that is zero in a training step.
        dtype: of the parameters.

    Hidden weights start as He's normal under ReLU and GELU and as Glorot's uniform
    otherwise, the last ones as Glorot's; biases start at zero.

    Example:
        >>> import jax
        >>> model = mlp(784, 10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(model.init(jax.random.key(0))))
        199210
    """
    if not isinstance(hidden, Sequence | np.ndarray) or isinstance(hidden, str):
        raise UserError("mlp: hidden", hidden, "a list of widths")
    for place, width in enumerate(hidden):
        COUNT(f"mlp: hidden[{place}]", width)
    glorot = initializers.glorot_uniform()
    start = initializers.he_normal() if activation in ("relu", "gelu") else glorot
    widths = (inputs, *hidden)

    def init(key):
        layers = [
            affine(start, jax.random.fold_in(key, place), before, after, dtype)
            for place, (before, after) in enumerate(pairwise(widths))
        ]
        end = jax.random.fold_in(key, len(layers))
        last = affine(glorot, end, widths[-1], outputs, dtype)
        return Mlp(tuple(layers), norms(hidden, dtype, norm), last)

    def features(params, rows, key=None, mask=None):
        training = Training(key, mask, dropout)
        here = flatten(rows, params.last.weight.dtype)
        for place, layer in enumerate(params.hidden):
            here = linear(layer, here)
            here = normalize(params.norm[place], here, training) if norm else here
            here = training.drop(place, ACTIVATIONS[activation](here))
        return here

    return join_halves(init, features, _last)


class Cnn(NamedTuple):
    """The four layers, and the normalizations of the first three, if any."""

    first: Kernel
    second: Kernel
    hidden: Affine
    norm: tuple[Norm, ...]
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
@gate(classes=COUNT, norm=_norm_rule, dropout=DROPOUT)
def cnn(
    shape: Shape,
    classes: int,
    *,
    norm: Normal = False,
    dropout: float = 0.0,
    dtype=jnp.float32,
) -> Model:
    """APFL's network: 5x5 to 20, pool, 5x5 to 50, pool, 512, scores.

    The paper says "2 convolution layers, followed by 2 fully connected layers"; widths,
    kernels, the missing padding and the pooling are those of its authors' code, which
    declares dropout and does not use it. 440 812 parameters for 28x28x1 and 10
    classes, 672 212 for 32x32x3. ``norm`` normalizes every image after each layer but
    the last, with a scale and an offset for each channel; "batch" normalizes each
    channel of a batch. ``dropout`` is the part of the 512 features that is zero in a
    training step.

    Example:
        >>> model = cnn((28, 28), 10)
        >>> params = model.init(jax.random.key(0))
        >>> model.apply(params, jnp.ones((2, 784))).shape
        (2, 10)
    """
    return _network(_APFL, shape, classes, norm, dropout, dtype)


@model("EMNIST's: convolutions 32-64, 128", image)
@gate(classes=COUNT, norm=_norm_rule, dropout=DROPOUT)
def large_cnn(
    shape: Shape,
    classes: int,
    *,
    norm: Normal = False,
    dropout: float = 0.0,
    dtype=jnp.float32,
) -> Model:
    """The larger network: 3x3 to 32, 3x3 to 64, pool, 128, scores.

    The EMNIST network of Reddi et al., which FLIX uses too; theirs has dropout of a
    quarter after pooling, too.
    1 626 442 parameters (1.63 million) for CIFAR's 32x32x3 and 10 classes; 1 199 882
    for 28x28x1 and 10 classes, 1 206 590 for 62. ``norm`` and ``dropout`` as of
    ``cnn``.
    """
    return _network(_LARGE, shape, classes, norm, dropout, dtype)


def _network(
    plan: _Plan,
    shape: Shape,
    classes: int,
    norm: Normal,
    dropout: float,
    dtype,
) -> Model:
    image = _image(plan, shape)
    entries = math.prod(_features(plan, image))
    he, glorot = initializers.he_normal(), initializers.glorot_uniform()
    size, (first, second) = plan.kernel, plan.channels

    def init(key):
        keys = [jax.random.fold_in(key, place) for place in range(4)]
        layers = (
            kernel(he, keys[0], (size, size, image[2], first), dtype),
            kernel(he, keys[1], (size, size, first, second), dtype),
            affine(he, keys[2], entries, plan.hidden, dtype),
        )
        last = affine(glorot, keys[3], plan.hidden, classes, dtype)
        widths = (*plan.channels, plan.hidden)
        return Cnn(*layers, norms(widths, dtype, norm), last)

    def features(params, rows, key=None, mask=None):
        training = Training(key, mask, dropout)

        def normal(place, here):
            return normalize(params.norm[place], here, training) if norm else here

        dtype = params.last.weight.dtype
        here = jnp.reshape(rows, (rows.shape[0], *image)).astype(dtype)
        for place, pooled in enumerate(plan.pooled):
            here = normal(place, convolve(params[place], here))
            # Pooling commutes with ReLU, which is cheaper afterwards.
            here = jax.nn.relu(pool(here) if pooled else here)
        here = normal(2, linear(params.hidden, flatten(here, dtype)))
        return training.drop(2, jax.nn.relu(here))

    return join_halves(init, features, _last)


def _image(plan: _Plan, shape: Shape) -> tuple[int, int, int]:
    """(height, width, channels) of rows that are large enough images."""
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{plan.name}: rows of shape {tuple(shape)} are not images, of shape "
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

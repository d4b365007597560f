# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 with group normalization, for small images.

``3x3 to 64, four pairs of blocks, mean over the image, scores``; a block is ``3x3,
normalize, ReLU, 3x3, normalize``, plus what came in, then ReLU. The pairs have 64, 128,
256 and 512 channels; all but the first halve the image, and there a 1x1 convolution
brings what came in to the new shape. Group in place of batch normalization, whose
running means are no parameters to average.

References:
    He, Zhang, Ren, Sun. Deep Residual Learning for Image Recognition. CVPR 2016.
    https://arxiv.org/abs/1512.03385
    Wu, He. Group Normalization. ECCV 2018. https://arxiv.org/abs/1803.08494
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import initializers

from fedblend.checks import COUNT, gate
from fedblend.core import Key
from fedblend.errors import UserError
from fedblend.models.convolution import convolution
from fedblend.models.feedforward import Affine, Norm, affine, linear, norms
from fedblend.models.model import Model, Shape, join_halves


class Block(NamedTuple):
    """Two convolutions with their normalizations, and those of what came in, if any."""

    first: jax.Array
    second: jax.Array
    norm: tuple[Norm, ...]
    shortcut: jax.Array | None


class ResNet(NamedTuple):
    """The first convolution with its normalization, the blocks, and the last layer."""

    first: jax.Array
    norm: Norm
    blocks: tuple[Block, ...]
    last: Affine


@gate(classes=COUNT, width=COUNT, groups=COUNT)
def resnet18(
    shape: Shape, classes: int, *, width: int = 64, groups: int = 32, dtype=jnp.float32
) -> Model:
    """ResNet-18 with group normalization; 11 173 962 parameters for CIFAR-10.

    Args:
        shape: of an image, (height, width) or (height, width, channels).
        classes: number of scores.
        width: channels of the first blocks.
        groups: of channels that are normalized together; divides ``width``.
        dtype: of the parameters.

    Example:
        >>> model = resnet18((8, 8, 3), 10, width=4, groups=2)
        >>> params = jax.eval_shape(model.init, jax.random.key(0))
        >>> jax.eval_shape(model.apply, params, jnp.ones((2, 8, 8, 3))).shape
        (2, 10)
    """
    if width % groups:
        raise UserError("resnet18: groups", groups, f"a divisor of width = {width}")
    if len(shape) not in (2, 3):
        raise UserError("resnet18: shape", shape, "(height, width, channels)")
    height, breadth, channels = (*shape, 1)[:3]
    he = initializers.he_normal()
    plan = [
        (width * 2**pair, 2 if pair and not at else 1)
        for pair in range(4)
        for at in (0, 1)
    ]

    def block(key: Key, inputs: int, outputs: int, stride: int) -> Block:
        keys = jax.random.split(key, 3)
        shorter = stride > 1 or inputs != outputs
        return Block(
            he(keys[0], (3, 3, inputs, outputs), dtype),
            he(keys[1], (3, 3, outputs, outputs), dtype),
            norms([outputs] * (3 if shorter else 2), dtype),
            he(keys[2], (1, 1, inputs, outputs), dtype) if shorter else None,
        )

    def init(key: Key) -> ResNet:
        keys = jax.random.split(key, len(plan) + 2)
        blocks, inputs = [], width
        for own, (outputs, stride) in zip(keys[2:], plan, strict=True):
            blocks.append(block(own, inputs, outputs, stride))
            inputs = outputs
        return ResNet(
            he(keys[0], (3, 3, channels, width), dtype),
            norms([width], dtype)[0],
            tuple(blocks),
            affine(initializers.glorot_uniform(), keys[1], inputs, classes, dtype),
        )

    def features(params: ResNet, rows: jax.Array) -> jax.Array:
        here = rows.reshape(len(rows), height, breadth, channels)
        here = same(here.astype(params.first.dtype), params.first)
        here = jax.nn.relu(normal(params.norm, here))
        for layer, (_, stride) in zip(params.blocks, plan, strict=True):
            here = _block(layer, stride, here)
        return here.mean(axis=(1, 2))

    def _block(layer: Block, stride: int, here: jax.Array) -> jax.Array:
        inner = normal(layer.norm[0], same(here, layer.first, stride=stride))
        inner = normal(layer.norm[1], same(jax.nn.relu(inner), layer.second))
        if layer.shortcut is not None:
            short = same(here, layer.shortcut, stride=stride)
            here = normal(layer.norm[2], short)
        return jax.nn.relu(inner + here)

    normal = partial(group_normalize, groups)
    return join_halves(init, features, lambda params, rows: linear(params.last, rows))


same = partial(convolution, padding="SAME")


def group_normalize(groups: int, layer: Norm, inputs: jax.Array) -> jax.Array:
    """Groups of channels of a row less their mean, over their deviation, then scaled.

    Mean and deviation are at least float32.
    """
    rows, *places, channels = inputs.shape
    wide = jnp.promote_types(inputs.dtype, jnp.float32)
    apart = inputs.reshape(rows, -1, groups, channels // groups).astype(wide)
    centered = apart - apart.mean(axis=(1, 3), keepdims=True)
    spread = jax.lax.rsqrt((centered**2).mean(axis=(1, 3), keepdims=True) + 1e-5)
    flat = (centered * spread).reshape(rows, *places, channels).astype(inputs.dtype)
    ones = (1,) * (inputs.ndim - 1)
    return flat * layer.scale.reshape(*ones, -1) + layer.offset.reshape(*ones, -1)

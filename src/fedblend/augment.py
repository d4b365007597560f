# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Random changes of images in training, on the device: crop, flip, cutout, mixup.

A change is a function of the rows ``(inputs, targets)`` and a key, and ``augment`` a
loss that changes the rows of each training step; in evaluation rows stay as they are.
Images are [rows, height, width] or [rows, height, width, channels].

References:
    DeVries, Taylor. Improved regularization of convolutional neural networks with
    cutout. 2017. https://arxiv.org/abs/1708.04552
    Zhang, Cisse, Dauphin, Lopez-Paz. mixup: beyond empirical risk minimization. ICLR
    2018. https://arxiv.org/abs/1710.09412
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import COUNT, Count, Positive, gate, optional
from fedblend.core import Batch, Key, Loss, PyTree
from fedblend.errors import SettingError, UserError
from fedblend.losses import row_losses

Change = Callable[[PyTree, Key], PyTree]
"""``change(rows, key) -> rows``, of the same number of rows."""


def augment(loss: Loss, *changes: Change) -> Loss:
    """The loss of rows that each training step changes anew.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        changes: functions of rows and a key, one after another.

    Example:
        >>> import fedblend as fb
        >>> model = fb.models.cnn((16, 16), 10)
        >>> plain = fb.losses.cross_entropy(model.apply)
        >>> loss = augment(plain, crop(2), flip)
        >>> params = model.init(jax.random.key(0))
        >>> rows = jax.random.normal(jax.random.key(1), (3, 16, 16)), jnp.arange(3)
        >>> bool((loss(params, rows) == plain(params, rows)).all())
        True
    """

    def augmented(params, rows, key=None, mask=None):
        if key is not None:
            own = keys.named(key, "augment")
            for place, change in enumerate(changes):
                rows = change(rows, jax.random.fold_in(own, place))
        return row_losses(loss, params, Batch(rows, mask, key=key))

    return augmented


def _each(change: Callable[[jax.Array, Key], jax.Array]) -> Change:
    """A change of every image by itself."""

    def images(rows, key):
        inputs, targets = rows
        if inputs.ndim not in (3, 4):
            said = f"rows of shape {inputs.shape[1:]}"
            raise UserError("augment: inputs", inputs, "images", said)
        return jax.vmap(change)(inputs, jax.random.split(key, len(inputs))), targets

    return images


@gate()
def crop(padding: Count) -> Change:
    """Images moved by up to ``padding`` places each way; zeros come in."""

    def move(image, key):
        edges = [(padding, padding)] * 2 + [(0, 0)] * (image.ndim - 2)
        start = jax.random.randint(key, (2,), 0, 2 * padding + 1)
        places = (*start, *[0] * (image.ndim - 2))
        return jax.lax.dynamic_slice(jnp.pad(image, edges), places, image.shape)

    return _each(move)


def flip(rows: PyTree, key: Key) -> PyTree:
    """Half of the images, at random, with left and right exchanged."""

    def turn(image, key):
        return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)

    return _each(turn)(rows, key)


@gate()
def cutout(size: Count) -> Change:
    """A square of ``size`` places around a random one becomes zero in each image."""

    def cut(image, key):
        shape = image.shape[:2]
        center = jax.random.randint(key, (2,), 0, jnp.array(shape))
        first = center - size // 2
        inside = [
            (jnp.arange(length) >= start) & (jnp.arange(length) < start + size)
            for length, start in zip(shape, first, strict=True)
        ]
        square = inside[0][:, None] & inside[1][None]
        return jnp.where(square.reshape(*shape, *[1] * (image.ndim - 2)), 0, image)

    return _each(cut)


@gate()
def mixup(
    strength: Positive, classes: Annotated[int | None, optional(COUNT)] = None
) -> Change:
    """Rows mixed with others of the batch, inputs and targets alike.

    Args:
        strength: alpha of the paper: the weight of a batch is Beta(alpha, alpha).
        classes: their number, where targets are class numbers: targets become
            probabilities, which ``losses.cross_entropy`` takes; None for values.
    """

    def mix(rows, key):
        inputs, targets = rows
        if classes is not None:
            targets = jax.nn.one_hot(targets, classes, dtype=inputs.dtype)
        elif not jnp.issubdtype(targets.dtype, jnp.floating):
            raise SettingError("mixup: classes", "is needed for targets that are whole")
        weight = jax.random.beta(key, strength, strength, dtype=inputs.dtype)
        order = jax.random.permutation(keys.named(key, "order"), len(inputs))
        return jax.tree.map(
            lambda leaf: weight * leaf + (1 - weight) * leaf[order], (inputs, targets)
        )

    return mix

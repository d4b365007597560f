# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Running statistics of batches, as parameters with a rule of their own.

A model with batch normalization has a ``Statistic`` for each running mean and variance
among its parameters. In training a layer normalizes by the rows of the batch, and the
statistic has the gradient of ``|value - observed|^2 / 2``, whatever the loss is. Local
steps move it by ``-momentum`` times that gradient, and by nothing else: no optimizer,
penalty or correction of gradients touches it. So it is the running mean of PyTorch,
and everything that averages, sends, compresses or keeps parameters has it, too.

A server takes the mean of the clients' statistics, whatever optimizer it has for the
rest of the model.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedblend import trees
from fedblend.core import PyTree
from fedblend.errors import SettingError

EPSILON = 1e-5
"""Added to variances, as PyTorch does."""


class _Inside:
    """The key of the value of a statistic: its path is that of the statistic."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Statistic:
    """A running mean of what batches have; ``momentum`` is the weight of a new one."""

    value: PyTree
    momentum: float = 0.1

    def tree_flatten_with_keys(self) -> tuple[Any, float]:
        """The value is a leaf, and the momentum is none."""
        return ((_Inside(), self.value),), self.momentum

    @classmethod
    def tree_unflatten(cls, momentum: float, values: Any) -> "Statistic":
        """The statistic of such parts."""
        return cls(values[0], momentum)


def is_statistic(node: Any) -> bool:
    """Whether this node of a tree is a statistic."""
    return isinstance(node, Statistic)


def has_statistics(params: PyTree) -> bool:
    """Whether a model, or the part of it that is there, has any."""
    leaves = jax.tree.leaves(params, is_leaf=is_statistic)
    return any(is_statistic(leaf) and leaf.value is not None for leaf in leaves)


def refuse_statistics(who: str, params: PyTree) -> None:
    """Refuse a model with statistics, in one line that begins with ``who``."""
    if has_statistics(params):
        raise SettingError(
            who,
            "takes no model with batch normalization, whose rows depend on each other "
            "and whose statistics only local steps move; normalize each row instead "
            "(group or layer normalization)",
        )


def without_statistics(params: PyTree) -> PyTree:
    """The same tree with None in place of statistics."""
    return jax.tree.map(
        lambda node: None if is_statistic(node) else node, params, is_leaf=is_statistic
    )


def hold_statistics(tree: PyTree) -> PyTree:
    """The same tree with zeros in place of statistics."""

    def hold(node):
        return trees.zeros_like(node) if is_statistic(node) else node

    return jax.tree.map(hold, tree, is_leaf=is_statistic)


def take_step(
    rule: optax.GradientTransformation,
    push: PyTree,
    state: PyTree,
    here: PyTree,
    gradient: PyTree,
    momentum: float | None = None,
) -> tuple[PyTree, PyTree]:
    """A step of an optimizer, and the steps of statistics.

    Args:
        rule: the optimizer; to it the gradient of statistics is zero.
        push: the gradient of everything else, with penalties and corrections.
        state: of the optimizer.
        here: the variables.
        gradient: that of statistics.
        momentum: rate of the steps of statistics; None for their own.

    Returns:
        The variables after the step, and the state.
    """

    def follow(after, before, slope):
        if not is_statistic(before):
            return after
        rate = before.momentum if momentum is None else momentum
        return trees.subtract(before, trees.scale(rate, slope))

    updates, state = rule.update(hold_statistics(push), state, here)
    moved = optax.apply_updates(here, updates)
    # The gradient may have parts that these variables leave out.
    return jax.tree.map(follow, moved, here, gradient, is_leaf=_ends), state


def _ends(node: PyTree) -> bool:
    """Whether a tree is not looked into: at statistics, and at a part left out."""
    return node is None or is_statistic(node)


@jax.custom_vjp
def _observe(outputs, values, observed):
    """The outputs, which make ``values - observed`` the gradient of the values."""
    del values, observed
    return outputs


_observe.defvjp(
    lambda outputs, values, observed: (outputs, trees.subtract(values, observed)),
    lambda gap, slope: (slope, gap, trees.zeros_like(gap)),
)


def standardize(
    inputs: jax.Array,
    mean: Statistic,
    variance: Statistic,
    *,
    training: bool,
    mask: jax.Array | None = None,
    channel: int = -1,
    epsilon: float = EPSILON,
) -> jax.Array:
    """Batch normalization, without scale and offset.

    In training by the mean and the variance of the rows that count, otherwise by the
    running ones. As in PyTorch the running variance is that of a sample, n / (n - 1)
    times as large. A single entry has no variance, and no entry leaves all as it was.

    Args:
        inputs: [rows, ...].
        mean: the running mean, [channels].
        variance: the running variance, [channels].
        training: whether the statistics of the batch are used, and move.
        mask: False at rows that only pad the shape, or None.
        channel: the axis of the channels.
        epsilon: added to variances.
    """
    known = mean.value, variance.value
    own = inputs.astype(mean.value.dtype)
    channel %= own.ndim
    every = range(own.ndim)
    axes = tuple(axis for axis in every if axis != channel)

    def spread(values):
        return values.reshape(
            [-1 if axis == channel else 1 for axis in range(own.ndim)]
        )

    def normal(center, square):
        scaled = (own - spread(center)) * jax.lax.rsqrt(spread(square) + epsilon)
        return scaled.astype(inputs.dtype)

    if not training:
        # A difference of compressed or noisy variances may be below 0.
        center, square = jax.lax.stop_gradient(known)
        return normal(center, jnp.maximum(square, 0))
    if mask is None:
        count = jnp.asarray(math.prod(own.shape[axis] for axis in axes), own.dtype)
        center = own.mean(axes)
        square = jnp.square(own - spread(center)).mean(axes)
    else:
        rows = mask.reshape(-1, *[1] * (own.ndim - 1))
        each = math.prod(own.shape[axis] for axis in axes if axis)
        count = mask.sum().astype(own.dtype) * each
        least = jnp.maximum(count, 1)
        center = jnp.where(rows, own, 0).sum(axes) / least
        gaps = jnp.square(own - spread(center))
        square = jnp.where(rows, gaps, 0).sum(axes) / least
    sample = square * count / jnp.maximum(count - 1, 1)
    observed = (
        jnp.where(count > 0, center, known[0]),
        jnp.where(count > 1, sample, known[1]),
    )
    return _observe(normal(center, square), known, observed)

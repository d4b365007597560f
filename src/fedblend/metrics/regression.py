# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted numbers."""

import jax
import jax.numpy as jnp

from fedblend.checks import FUNCTION, gate
from fedblend.metrics.metric import (
    Metric,
    explained,
    mean,
    mean_and_rows,
    mean_error,
    of_outputs,
    root_error,
)
from fedblend.mixing import Apply


@gate(apply=FUNCTION)
def mean_squared_error(apply: Apply) -> Metric:
    """The squared error, averaged over rows and outputs."""

    def measure(outputs, targets, mask):
        return mean_and_rows(_by_row(jnp.square(_gaps(outputs, targets))), mask)

    return of_outputs(mean_error, apply, measure)


@gate(apply=FUNCTION)
def mean_absolute_error(apply: Apply) -> Metric:
    """The absolute error, averaged over rows and outputs."""

    def measure(outputs, targets, mask):
        return mean_and_rows(_by_row(jnp.abs(_gaps(outputs, targets))), mask)

    return of_outputs(mean_error, apply, measure)


@gate(apply=FUNCTION)
def root_mean_squared_error(apply: Apply) -> Metric:
    """The square root of the squared error, averaged over rows and outputs."""

    def measure(outputs, targets, mask):
        squares = _by_row(jnp.square(_gaps(outputs, targets)))
        whole = mean(squares, mask)
        value = jnp.sqrt(whole)
        # Pseudo-values, from the derivative of the root; a perfect fit has none.
        each = (squares - whole) / jnp.where(value > 0, 2 * value, 1)
        return value, jnp.where(mask, value + each, jnp.nan)

    return of_outputs(root_error, apply, measure)


@gate(apply=FUNCTION)
def r2_score(apply: Apply) -> Metric:
    """The coefficient of determination: the part of the variance that is explained.

    One is perfect, zero is what the mean of the client's own targets would have; worse
    models have less. With several outputs it is their mean. NaN where targets do not
    vary.
    """

    def measure(outputs, targets, mask):
        wide = targets.reshape(len(targets), -1).astype(outputs.dtype)
        known = mask[:, None]
        count = jnp.maximum(mask.sum(), 1)
        squares = jnp.where(known, jnp.square(outputs.reshape(wide.shape) - wide), 0)
        center = jnp.where(known, wide, 0).sum(axis=0) / count
        spread = jnp.where(known, jnp.square(wide - center[None]), 0)
        total = spread.sum(axis=0)
        # Rounding of the mean leaves a spread of targets that are all the same.
        top = jnp.where(known, wide, -jnp.inf).max(axis=0)
        varies = (top > jnp.where(known, wide, jnp.inf).min(axis=0)) & (total > 0)
        left = squares.sum(axis=0) / jnp.where(varies, total, 1)
        value = jnp.where(varies.all() & mask.any(), 1 - left.mean(), jnp.nan)
        # Pseudo-values, from the derivative of the ratio in the weight of a row.
        each = (squares - left[None] * spread) / jnp.where(varies, total, 1)[None]
        return value, jnp.where(mask, value - count * each.mean(axis=1), jnp.nan)

    return of_outputs(explained, apply, measure)


def _gaps(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return outputs.reshape(targets.shape) - targets


def _by_row(gaps: jax.Array) -> jax.Array:
    """The mean over the outputs of each row."""
    return gaps.reshape(gaps.shape[0], -1).mean(axis=1)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted probabilities: are they sharp, and are they true?

Scores become probabilities by the logistic function (a single score), or by softmax.
"""

import jax
import jax.numpy as jnp

from fedblend.checks import COUNT, FUNCTION, gate
from fedblend.metrics.metric import (
    Metric,
    bounded_error,
    calibration,
    is_binary,
    margin,
    mean,
    mean_and_rows,
    mean_error,
    of_outputs,
    of_outputs_without_rows,
)
from fedblend.mixing import Apply

BINS = 10
"""Of equal width, in which the calibration error compares."""


@gate(apply=FUNCTION)
def log_loss(apply: Apply) -> Metric:
    """The mean of minus the logarithm of the probability of the right class.

    It comes from the scores themselves, so no probability is cut off near zero.
    """

    def measure(scores, targets, mask):
        known, right = _log_chances(scores), _labels(scores, targets)
        chosen = jnp.take_along_axis(known, right[:, None], axis=1)[:, 0]
        return mean_and_rows(-chosen, mask)

    return of_outputs(mean_error, apply, measure)


@gate(apply=FUNCTION)
def brier_score(apply: Apply) -> Metric:
    """Half of the squared error of the probabilities, summed over classes.

    With two classes it is the squared error of the probability of class 1. It lies in
    [0, 1]; many authors leave the half out where there are more than two classes.
    """

    def measure(scores, targets, mask):
        chances, right = jnp.exp(_log_chances(scores)), _labels(scores, targets)
        wanted = jax.nn.one_hot(right, chances.shape[1], dtype=chances.dtype)
        return mean_and_rows(jnp.square(chances - wanted).sum(axis=1) / 2, mask)

    return of_outputs(bounded_error, apply, measure)


@gate(apply=FUNCTION, bins=COUNT)
def calibration_error(apply: Apply, bins: int = BINS) -> Metric:
    """How far stated probabilities are from frequencies: the expected error over bins.

    Rows fall into ``bins`` of equal width by their probability; in each, the mean of
    the probabilities is compared with how often they came true, and bins count by their
    rows. With two classes the probability is that of class 1; with more it is that of
    the predicted class, which came true where it is right (Guo et al., 2017). With few
    rows a perfect model has an error as well, so compare it on the same rows only.
    """

    def measure(scores, targets, mask):
        chance, came_true = _stated(scores, targets)
        edges = jnp.arange(1, bins) / bins
        place = jnp.searchsorted(edges.astype(chance.dtype), chance, side="left")
        gap = jnp.where(mask, chance - came_true, 0)
        inside = place[:, None] == jnp.arange(bins)[None]
        total = jnp.abs(jnp.where(inside, gap[:, None], 0).sum(axis=0)).sum()
        count = mask.sum()
        return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)

    return of_outputs_without_rows(calibration, apply, measure)


@gate(apply=FUNCTION)
def calibration_gap(apply: Apply) -> Metric:
    """How far the mean probability is from the frequency: calibration in the large.

    With two classes the probability is that of class 1; with more it is that of the
    predicted class.
    """

    def measure(scores, targets, mask):
        chance, came_true = _stated(scores, targets)
        gap = mean(chance - came_true, mask)
        # Pseudo-values: towards the side on which the mean lies.
        rows = jnp.where(gap < 0, came_true - chance, chance - came_true)
        return jnp.abs(gap), jnp.where(mask, rows, jnp.nan)

    return of_outputs(calibration, apply, measure)


def _log_chances(scores: jax.Array) -> jax.Array:
    """The logarithms of the probabilities of all classes."""
    if is_binary(scores):
        odds = margin(scores)
        return -jnp.stack([jax.nn.softplus(odds), jax.nn.softplus(-odds)], axis=1)
    return jax.nn.log_softmax(scores, axis=1)


def _labels(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The numbers of the right classes; of two they may be -1 and 1 as well."""
    return (targets > 0 if is_binary(scores) else targets).astype(int)


def _stated(scores: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability that a model states for every row, and whether it came true."""
    chances, right = jnp.exp(_log_chances(scores)), _labels(scores, targets)
    if is_binary(scores):
        return chances[:, 1], right.astype(chances.dtype)
    came_true = chances.argmax(axis=1) == right
    return chances.max(axis=1), came_true.astype(chances.dtype)

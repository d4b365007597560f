# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted classes: how many rows are right."""

import jax
import jax.numpy as jnp

from fedblend.checks import COUNT, FUNCTION, gate
from fedblend.core import Loss
from fedblend.metrics.metric import (
    Metric,
    RowByRow,
    fraction_of_rows,
    is_binary,
    margin,
    mean,
    mean_and_rows,
    mean_error,
    of_outputs,
    rowwise,
    score,
    unless_nan,
)
from fedblend.mixing import Apply


@gate(loss=FUNCTION)
def mean_loss(loss: Loss) -> Metric:
    """The mean of a loss."""

    def finish(losses, rows, mask):
        del rows
        return mean_and_rows(losses, mask)

    return rowwise(mean_error, RowByRow(loss, finish))


@gate(apply=FUNCTION)
def accuracy(apply: Apply) -> Metric:
    """The fraction of rows whose class is right.

    The class is the largest score; where there is a single score, a positive one says
    class 1 (targets 0 and 1, or -1 and 1). A score that is NaN is neither right nor
    wrong: the accuracy is NaN as well.
    """

    def measure(scores, targets, mask):
        return mean_and_rows(unless_nan(_right(scores, targets), scores), mask)

    return of_outputs(fraction_of_rows, apply, measure)


@gate(apply=FUNCTION)
def balanced_accuracy(apply: Apply) -> Metric:
    """The mean over classes of the fraction of their rows that are right.

    Every class counts the same, however few rows it has; a class without rows does not
    count. A model that always says the same class has one over the number of classes.
    """

    def measure(scores, targets, mask):
        right = unless_nan(_right(scores, targets), scores)
        labels = (targets > 0).astype(int) if is_binary(scores) else targets
        count = 2 if is_binary(scores) else scores.shape[1]
        members = (labels[:, None] == jnp.arange(count)[None]) & mask[:, None]
        sizes = members.sum(axis=0)
        hits = jnp.where(members, right[:, None], 0).sum(axis=0)
        recalls = hits / jnp.maximum(sizes, 1)
        value = mean(recalls, sizes > 0)
        # Pseudo-values: a row counts by the share of its class in the mean.
        each = (right[:, None] - recalls[None]) / jnp.maximum(sizes, 1)[None]
        each = jnp.where(members, each, 0).sum(axis=1)
        weight = mask.sum() / jnp.maximum((sizes > 0).sum(), 1)
        return value, jnp.where(mask, value + weight * each, jnp.nan)

    return of_outputs(score, apply, measure)


@gate(apply=FUNCTION)
def next_token_accuracy(apply: Apply) -> Metric:
    """The fraction of places of all sequences whose next token is right.

    Scores are [rows, length, classes]; places with a negative target do not count.
    """

    def measure(scores, targets, mask):
        right = unless_nan(scores.argmax(axis=2) == targets, scores)
        mask = mask[:, None] & (targets >= 0)
        value, places = mean(right, mask), mask.sum(axis=1)
        # A row counts by its places: it brings more, the more of them it has.
        total = jnp.where(mask, right, 0).sum(axis=1) - value * places
        scale = (places > 0).sum() / jnp.maximum(places.sum(), 1)
        return value, jnp.where(places > 0, value + total * scale, jnp.nan)

    return of_outputs(fraction_of_rows, apply, measure)


@gate(apply=FUNCTION, k=COUNT)
def recall_at(apply: Apply, k: int) -> Metric:
    """How much of what is right is among the ``k`` highest scores.

    Targets are class numbers (is it among them?), or ones and zeros over the labels of
    every row (which part of its labels is?); rows without labels do not count.
    """

    def measure(scores, targets, mask):
        if not 1 <= k <= scores.shape[-1]:
            raise ValueError(
                f"recall_at: k = {k}, it has to be between 1 and the model's "
                f"{scores.shape[-1]} outputs"
            )
        _, top = jax.lax.top_k(scores, k)
        if targets.ndim == 1:
            found = (top == targets[:, None]).any(axis=1)
            return mean_and_rows(unless_nan(found, scores), mask)
        hits = (jnp.take_along_axis(targets, top, axis=1) > 0).sum(axis=1)
        labels = (targets > 0).sum(axis=1)
        part = unless_nan(hits / jnp.maximum(labels, 1), scores)
        return mean_and_rows(part, mask & (labels > 0))

    return of_outputs(fraction_of_rows, apply, measure)


def _right(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether the predicted class of every row is the target."""
    if scores.ndim == 1 or scores.shape[1] == 1:
        return (margin(scores) > 0) == (targets > 0)
    return scores.argmax(axis=1) == targets

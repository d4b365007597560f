# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted classes, probabilities and numbers, to which rows contribute.

Scores become probabilities by the logistic function (a single score), or by softmax.

Other metrics judge how scores order the rows. They need no threshold, and classes may
have any frequency. With two classes the score is the single one, or the second less the
first. With more, each class is told from all others by the odds of its probability
(one-vs-rest), and the metric is the mean over the classes that can be told apart: those
that a client's rows belong to, and not all of them. It is NaN where there are none.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from fedblend.checks import COUNT, FUNCTION, gate
from fedblend.core import Batch, Loss
from fedblend.losses import poisson, row_losses
from fedblend.metrics.metric import (
    Metric,
    RowByRow,
    RowValues,
    WeightedMeasure,
    bounded_error,
    calibration,
    explained,
    fraction_of_rows,
    is_binary,
    margin,
    mean,
    mean_and_rows,
    mean_error,
    mean_of_all,
    mean_of_rows,
    metric_of_rows,
    ranking,
    ratio,
    root_error,
    score,
    unless_nan,
)
from fedblend.mixing import Apply

SIDES = ("left", "right")
BINS = 10
"""Of equal width, in which the calibration error compares."""


class Builder(Protocol):
    """A function from the model's function to a metric."""

    __name__: str

    def __call__(self, apply: Apply) -> Metric:
        """The metric of ``apply(params, inputs)``."""
        ...


def _builder(
    join: Callable[..., Metric], make: Callable[..., Metric]
) -> Callable[[RowValues | WeightedMeasure], Builder]:
    """The decorated function of outputs as a builder of metrics, with its docstring."""

    def declare(measure: RowValues | WeightedMeasure) -> Builder:
        def build(apply: Apply) -> Metric:
            return join(make, apply, measure)

        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(build, name, getattr(measure, name))
        return gate(apply=FUNCTION)(build)

    return declare


@gate(loss=FUNCTION)
def mean_loss(loss: Loss) -> Metric:
    """The mean of a loss."""

    def finish(losses, rows, mask):
        del rows
        return mean_and_rows(losses, mask)

    def losses_of(model, rows):
        return row_losses(loss, model, Batch(rows))

    return metric_of_rows(mean_error, RowByRow(losses_of, finish))


@_builder(mean_of_rows, fraction_of_rows)
def accuracy(scores, targets):
    """The fraction of rows whose class is right.

    The class is the largest score; where there is a single score, a positive one says
    class 1 (targets 0 and 1, or -1 and 1). A score that is NaN is neither right nor
    wrong: the accuracy is NaN as well.
    """
    return unless_nan(_right(scores, targets), scores)


@_builder(mean_of_all, score)
def balanced_accuracy(scores, targets, weights):
    """The mean over classes of the fraction of their rows that are right.

    Every class counts the same, however few rows it has; a class without rows does not
    count. A model that always says the same class has one over the number of classes.
    """
    right = unless_nan(_right(scores, targets), scores)
    right = jnp.where(weights > 0, right, 0)
    count = 2 if is_binary(scores) else scores.shape[1]
    members = jax.nn.one_hot(_labels(scores, targets), count) * weights[:, None]
    sizes = members.sum(axis=0)
    return mean(ratio(right @ members, sizes), sizes > 0)


@gate(apply=FUNCTION)
def next_token_accuracy(apply: Apply) -> Metric:
    """The fraction of places of all sequences whose next token is right.

    Scores are [rows, length, classes]; places with a negative target do not count.
    """

    def measure(scores, targets, weights):
        right = unless_nan(scores.argmax(axis=2) == targets, scores)
        return mean(right, weights[:, None] * (targets >= 0))

    def counts(targets):
        return (targets >= 0).any(axis=1)

    return mean_of_all(fraction_of_rows, apply, measure, counts)


@gate(apply=FUNCTION, k=COUNT)
def recall_at(apply: Apply, k: int) -> Metric:
    """How much of what is right is among the ``k`` highest scores.

    Targets are class numbers (is it among them?), or ones and zeros over the labels of
    every row (which part of its labels is?); rows without labels do not count.
    """

    def values(scores, targets):
        if not 1 <= k <= scores.shape[-1]:
            raise ValueError(
                f"recall_at: k = {k}, it has to be between 1 and the model's "
                f"{scores.shape[-1]} outputs"
            )
        _, top = jax.lax.top_k(scores, k)
        if targets.ndim == 1:
            return unless_nan((top == targets[:, None]).any(axis=1), scores)
        hits = (jnp.take_along_axis(targets, top, axis=1) > 0).sum(axis=1)
        labels = (targets > 0).sum(axis=1)
        return unless_nan(hits / jnp.maximum(labels, 1), scores)

    def counts(targets):
        return jnp.full(len(targets), True) if targets.ndim == 1 else targets.any(1)

    return mean_of_rows(fraction_of_rows, apply, values, counts)


def _right(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether the predicted class of every row is the target."""
    if scores.ndim == 1 or scores.shape[1] == 1:
        return (margin(scores) > 0) == (targets > 0)
    return scores.argmax(axis=1) == targets


@_builder(mean_of_rows, mean_error)
def log_loss(scores, targets):
    """The mean of minus the logarithm of the probability of the right class.

    It comes from the scores themselves, so no probability is cut off near zero.
    """
    right = _labels(scores, targets)[:, None]
    return -jnp.take_along_axis(_log_chances(scores), right, axis=1)[:, 0]


@_builder(mean_of_rows, bounded_error)
def brier_score(scores, targets):
    """Half of the squared error of the probabilities, summed over classes.

    With two classes it is the squared error of the probability of class 1. It lies in
    [0, 1]; many authors leave the half out where there are more than two classes.
    """
    chances, right = jnp.exp(_log_chances(scores)), _labels(scores, targets)
    wanted = jax.nn.one_hot(right, chances.shape[1], dtype=chances.dtype)
    return jnp.square(chances - wanted).sum(axis=1) / 2


@gate(apply=FUNCTION, bins=COUNT)
def calibration_error(apply: Apply, bins: int = BINS) -> Metric:
    """How far stated probabilities are from frequencies: the expected error over bins.

    Rows fall into ``bins`` of equal width by their probability; in each, the mean of
    the probabilities is compared with how often they came true, and bins count by their
    rows. With two classes the probability is that of class 1; with more it is that of
    the predicted class, which came true where it is right (Guo et al., 2017). With few
    rows a perfect model has an error as well, so compare it on the same rows only.
    """

    def measure(scores, targets, weights):
        chance, came_true = _chances(scores, targets)
        edges = jnp.arange(1, bins) / bins
        place = jnp.searchsorted(edges.astype(chance.dtype), chance, side="left")
        gaps = weights * jnp.where(weights > 0, chance - came_true, 0)
        inside = jax.nn.one_hot(place, bins, dtype=gaps.dtype)
        return ratio(jnp.abs(gaps @ inside).sum(), weights.sum())

    # Its derivative jumps where a bin's error changes its sign.
    return dataclasses.replace(mean_of_all(calibration, apply, measure), with_rows=None)


@_builder(mean_of_all, calibration)
def calibration_gap(scores, targets, weights):
    """How far the mean probability is from the frequency: calibration in the large.

    With two classes the probability is that of class 1; with more it is that of the
    predicted class.
    """
    chance, came_true = _chances(scores, targets)
    gap = mean(chance - came_true, weights)
    return jnp.where(gap < 0, -gap, gap)


def _log_chances(scores: jax.Array) -> jax.Array:
    """The logarithms of the probabilities of all classes."""
    if is_binary(scores):
        odds = margin(scores)
        return -jnp.stack([jax.nn.softplus(odds), jax.nn.softplus(-odds)], axis=1)
    return jax.nn.log_softmax(scores, axis=1)


def _labels(scores: jax.Array, targets: jax.Array) -> jax.Array:
    """The numbers of the right classes; of two they may be -1 and 1 as well."""
    return (targets > 0 if is_binary(scores) else targets).astype(int)


def _chances(scores: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The probability that a model states for every row, and whether it came true."""
    chances, right = jnp.exp(_log_chances(scores)), _labels(scores, targets)
    if is_binary(scores):
        return chances[:, 1], right.astype(chances.dtype)
    came_true = chances.argmax(axis=1) == right
    return chances.max(axis=1), came_true.astype(chances.dtype)


@_builder(mean_of_rows, mean_error)
def mean_squared_error(outputs, targets):
    """The squared error, averaged over rows and outputs."""
    return _average(jnp.square(_gaps(outputs, targets)))


@_builder(mean_of_rows, mean_error)
def poisson_deviance(scores, targets):
    """The mean Poisson deviance; a score is the logarithm of the expected count."""
    return 2 * poisson(lambda _, outputs: outputs)((), (scores, targets))


@_builder(mean_of_rows, mean_error)
def mean_absolute_error(outputs, targets):
    """The absolute error, averaged over rows and outputs."""
    return _average(jnp.abs(_gaps(outputs, targets)))


@_builder(mean_of_all, root_error)
def root_mean_squared_error(outputs, targets, weights):
    """The square root of the squared error, averaged over rows and outputs."""
    whole = mean(_average(jnp.square(_gaps(outputs, targets))), weights)
    # A perfect fit has no derivative.
    return jnp.where(whole == 0, 0, jnp.sqrt(jnp.where(whole == 0, 1, whole)))


@_builder(mean_of_all, explained)
def r2_score(outputs, targets, weights):
    """The coefficient of determination: the part of the variance that is explained.

    One is perfect, zero is what the mean of the client's own targets would have; worse
    models have less. With several outputs it is their mean. NaN where targets do not
    vary.
    """
    known = weights[:, None] > 0
    wide = targets.reshape(len(targets), -1).astype(weights.dtype)
    wide = jnp.where(known, wide, 0)
    gaps = jnp.where(known, outputs.reshape(wide.shape) - wide, 0)
    center = ratio(weights @ wide, weights.sum())
    total = weights @ jnp.square(wide - center[None])
    # Rounding of the mean leaves a spread of targets that are all the same.
    top = jnp.where(known, wide, -jnp.inf).max(axis=0)
    varies = (top > jnp.where(known, wide, jnp.inf).min(axis=0)) & (total > 0)
    left = (weights @ jnp.square(gaps)) / jnp.where(varies, total, 1)
    return jnp.where(varies.all(), 1 - left.mean(), jnp.nan)


def _gaps(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return outputs.reshape(targets.shape) - targets


def _average(gaps: jax.Array) -> jax.Array:
    """The mean over the outputs of each row."""
    return gaps.reshape(gaps.shape[0], -1).mean(axis=1)


Ranked = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""``f(scores, weights of class 1, weights of class 0)``: the number."""


@_builder(mean_of_all, ranking)
def auc(outputs, targets, weights):
    """The area under the ROC curve, exactly; a tie counts one half.

    It is the chance that a row of class 1 scores higher than one of class 0. The
    score is the single one, or with two classes the second less the first. With more
    classes it is the mean over classes, each against all others.
    """
    return _one_vs_rest(_area, outputs, targets, weights)


@_builder(mean_of_all, ranking)
def average_precision(outputs, targets, weights):
    """The mean, over the rows of class 1, of the precision at each one's score.

    The precision is the part of class 1 among the rows that score as high or higher: so
    it is the area under the curve of precision against recall, in steps. A model that
    knows nothing has the frequency of class 1, not one half. With more classes it is
    the mean over classes, each against all others.
    """
    return _one_vs_rest(_precision, outputs, targets, weights)


def _one_vs_rest(ranked: Ranked, outputs, targets, weights):
    """The measure of outputs, from one of scores and which rows are positive."""
    if is_binary(outputs):
        scores, positive = margin(outputs), targets > 0
        value = ranked(scores, weights * positive, weights * ~positive)
    else:
        chances = jax.nn.log_softmax(outputs, axis=1)
        labels = jnp.arange(chances.shape[1])

        def tell(label):
            """One class from all others, by the odds of its probability."""
            others = jnp.where((labels == label)[None], -jnp.inf, chances)
            odds = chances[:, label] - jax.nn.logsumexp(others, axis=1)
            positive = targets == label
            return ranked(odds, weights * positive, weights * ~positive)

        values = jax.lax.map(tell, labels)
        value = mean(values, ~jnp.isnan(values))
    unknown = jnp.isnan(outputs).reshape(len(weights), -1).any(axis=1)
    return jnp.where((unknown & (weights > 0)).any(), jnp.nan, value)


def _area(scores, ones, zeros):
    below, through = _weigh_lower(scores, zeros)
    return mean(ratio((below + through) / 2, zeros.sum()), ones)


def _precision(scores, ones, zeros):
    ahead, hits = (
        weights.sum() - _weigh_lower(scores, weights)[0]
        for weights in (ones + zeros, ones)
    )
    return mean(ratio(hits, ahead), ones)


def _weigh_lower(scores, weights):
    """The weight of the rows that score lower than each, and with those that tie."""
    order = jnp.argsort(scores)
    total = jnp.concatenate([jnp.zeros(1), jnp.cumsum(weights[order])])
    places = (jnp.searchsorted(scores[order], scores, side) for side in SIDES)
    return tuple(total[place] for place in places)

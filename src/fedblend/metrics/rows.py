# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted classes, probabilities and numbers, to which rows contribute.

Scores become probabilities by the logistic function (a single score), or by softmax.

Metrics of how scores order the rows: no threshold, and classes of any frequency.

With two classes the score is the single one, or the second less the first. With more,
each class is told from all others by the odds of its probability (one-vs-rest), and the
metric is the mean over the classes that can be told apart: those that a client's rows
belong to, and not all of them. It is NaN where there are none.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedblend.checks import COUNT, FUNCTION, gate
from fedblend.core import Loss
from fedblend.metrics.metric import (
    Metric,
    RowByRow,
    bounded_error,
    calibration,
    explained,
    fraction_of_rows,
    is_binary,
    margin,
    mean,
    mean_and_rows,
    mean_error,
    metric_of_rows,
    of_outputs,
    of_outputs_without_rows,
    ranking,
    root_error,
    score,
    unless_nan,
)
from fedblend.mixing import Apply

BINS = 10
"""Of equal width, in which the calibration error compares."""


@gate(loss=FUNCTION)
def mean_loss(loss: Loss) -> Metric:
    """The mean of a loss."""

    def finish(losses, rows, mask):
        del rows
        return mean_and_rows(losses, mask)

    return metric_of_rows(mean_error, RowByRow(loss, finish))


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


Ranked = Callable[
    [jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]
]
"""``f(scores, positive, mask)``: the number, what rows bring, whether it is defined."""


@gate(apply=FUNCTION)
def auc(apply: Apply) -> Metric:
    """The area under the ROC curve, exactly; a tie counts one half.

    It is the chance that a row of class 1 scores higher than one of class 0. The
    score is the single one, or with two classes the second less the first. With more
    classes it is the mean over classes, each against all others.
    """
    return of_outputs(ranking, apply, _one_vs_rest(_area))


@gate(apply=FUNCTION)
def average_precision(apply: Apply) -> Metric:
    """The mean, over the rows of class 1, of the precision at each one's score.

    The precision is the part of class 1 among the rows that score as high or higher: so
    it is the area under the curve of precision against recall, in steps. A model that
    knows nothing has the frequency of class 1, not one half. With more classes it is
    the mean over classes, each against all others.
    """
    return of_outputs(ranking, apply, _one_vs_rest(_precision))


def _one_vs_rest(ranked: Ranked):
    """The measure of outputs, from one of scores and which rows are positive."""

    def measure(outputs, targets, mask):
        if is_binary(outputs):
            scores = margin(outputs)
            value, rows, defined = ranked(scores, targets > 0, mask)
        else:
            scores = jax.nn.log_softmax(outputs, axis=1)
            value, rows, defined = _over_classes(ranked, scores, targets, mask)
        unknown = jnp.isnan(scores).reshape(len(mask), -1).any(axis=1)
        defined = defined & ~jnp.any(mask & unknown)
        return jnp.where(defined, value, jnp.nan), jnp.where(
            defined & mask, rows, jnp.nan
        )

    return measure


def _over_classes(ranked: Ranked, chances, targets, mask):
    """The mean over the classes that can be told apart from the others."""
    labels = jnp.arange(chances.shape[1])

    def of_class(label):
        others = jnp.where((labels == label)[None], -jnp.inf, chances)
        odds = chances[:, label] - jax.nn.logsumexp(others, axis=1)
        return ranked(odds, targets == label, mask)

    values, brings, told = jax.lax.map(of_class, labels)
    rows = jnp.where(told[:, None] & mask[None], brings, 0).sum(axis=0)
    return mean(values, told), rows / jnp.maximum(told.sum(), 1), told.any()


def _area(scores, positive, mask):
    positive, negative = mask & positive, mask & ~positive
    rivals = negative.sum()
    # Infinity moves the rows that do not count to the end, past all rivals.
    ordered = jnp.sort(jnp.where(negative, scores, jnp.inf))
    below = jnp.searchsorted(ordered, scores, side="left")
    not_above = jnp.minimum(jnp.searchsorted(ordered, scores, "right"), rivals)
    won = (below + not_above).astype(scores.dtype) / 2 / jnp.maximum(rivals, 1)
    value = mean(won, positive)
    rises = jnp.sort(jnp.where(positive, scores, jnp.inf))
    ahead = positive.sum() - jnp.searchsorted(rises, scores, "right")
    level = jnp.searchsorted(rises, scores, "right") - jnp.searchsorted(
        rises, scores, "left"
    )
    lost = (ahead + level / 2) / jnp.maximum(positive.sum(), 1)
    # Pseudo-values: their mean is the area, its error that of DeLong et al. (1988).
    own = jnp.where(positive, positive.sum(), rivals)
    each = jnp.where(positive, won, lost) - value
    brings = value + each * mask.sum() / jnp.maximum(own, 1)
    return value, brings, (rivals > 0) & (positive.sum() > 0)


def _precision(scores, positive, mask):
    positive = mask & positive
    rows, ones = mask.sum(), jnp.maximum(positive.sum(), 1)
    # Minus infinity moves the rows that do not count to the front, below all others.
    everyone = jnp.sort(jnp.where(mask, scores, -jnp.inf))
    relevant = jnp.sort(jnp.where(positive, scores, -jnp.inf))
    ahead = len(scores) - jnp.searchsorted(everyone, scores, "left")
    hits = len(scores) - jnp.searchsorted(relevant, scores, "left")
    ahead, hits = jnp.minimum(ahead, rows), jnp.minimum(hits, positive.sum())
    precision = hits / jnp.maximum(ahead, 1).astype(scores.dtype)
    value = mean(precision, positive)
    # Pseudo-values, from the derivative in the weight of a row: it has a precision of
    # its own, and is among the rows ahead of every positive row that scores no higher.
    rises = jnp.where(positive, scores, jnp.inf)
    order = jnp.argsort(rises)
    below = jnp.searchsorted(rises[order], scores, "right")
    share = jnp.where(positive, 1 / jnp.maximum(ahead, 1), 0)[order]
    shares = jnp.concatenate([jnp.zeros(1), jnp.cumsum(share)])[below]
    losses = jnp.concatenate([jnp.zeros(1), jnp.cumsum(share * precision[order])])
    own = jnp.where(positive, precision - value + shares, 0)
    brings = value + (own - losses[below]) * rows / ones
    return value, brings, positive.any()

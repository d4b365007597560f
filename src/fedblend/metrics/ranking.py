# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of how scores order the rows: no threshold, and classes of any frequency.

With two classes the score is the single one, or the second less the first. With more,
each class is told from all others by the odds of its probability (one-vs-rest), and the
metric is the mean over the classes that can be told apart: those that a client's rows
belong to, and not all of them. It is NaN where there are none.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedblend.checks import FUNCTION, gate
from fedblend.metrics.metric import (
    Metric,
    is_binary,
    margin,
    mean,
    of_outputs,
    ranking,
)
from fedblend.mixing import Apply

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

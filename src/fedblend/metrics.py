# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics: of a model on one client's rows, and over clients.

A ``Metric`` is a JAX function ``fn(model, batch) -> number`` for one client, to be
mapped over clients, and the direction that is better. The model is a set of parameters
or a ``Blend``. The number is NaN where the metric is not defined: no rows, or an area
under the curve with one class only.

Statistics over clients are NumPy and leave out clients with NaN. The mean alone hides
what personalization is for, so ``Spread`` has the worst tenth beside it; ``gains``
counts the clients that do better and worse with their personal model than with another.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.checks import COUNT, FLAG, FUNCTION, gate, words
from fedblend.core import Batch, Loss, PyTree
from fedblend.errors import UserError
from fedblend.mixing import Apply, predict

Measure = Callable[[PyTree, Batch], jax.Array]
"""``measure(model, batch)``: a number for one client, NaN where it is not defined."""
RowMeasure = Callable[[PyTree, Batch], tuple[jax.Array, jax.Array]]
"""``measure(model, batch)``: the number, and the numbers of rows whose mean it is."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A function of a model and one client's rows, and which direction is better.

    >>> def most_wrong(model, batch):
    ...     return jnp.abs(batch.rows - model).max()
    >>> Metric(most_wrong, higher_is_better=False)(1.0, Batch(jnp.array([1.0, 3.0])))
    Array(2., dtype=float32)
    """

    fn: Measure
    higher_is_better: bool
    with_rows: RowMeasure | None = None
    """The same number and what each row contributes, NaN where a row does not count: so
    two models are compared row by row. None where only the number is known."""
    bounded: bool = False
    """Whether the number lies in [0, 1]."""
    counts_rows: bool = False
    """Whether the number is the fraction of rows that are right."""

    def __call__(self, model: PyTree, batch: Batch) -> jax.Array:
        """The number alone."""
        return self.fn(model, batch)


_loss = partial(Metric, higher_is_better=False)
_fraction = partial(Metric, higher_is_better=True, bounded=True)
_fraction_of_rows = partial(_fraction, counts_rows=True)
_KNOWN = MappingProxyType(
    {
        "loss": _loss,
        "mse": _loss,
        "accuracy": _fraction_of_rows,
        "auc": _fraction,
        "recall": _fraction_of_rows,
    }
)
"""What a plain function under one of these names is taken for."""


def as_metrics(measure: Mapping[str, Metric | Measure] | None) -> dict[str, Metric]:
    """Metrics by name, as the argument ``measure`` of ``simulate`` has them.

    A plain function becomes a ``Metric`` where its name says which direction is better:
    "loss", "mse", "accuracy", "auc" or "recall", with anything behind an "@".
    """
    if not isinstance(measure or {}, Mapping):
        raise UserError("measure", measure, "a mapping from names to metrics")
    return {name: _as_metric(name, one) for name, one in (measure or {}).items()}


def _as_metric(name: str, measure: Metric | Measure) -> Metric:
    if isinstance(measure, Metric):
        return measure
    make = _KNOWN.get(name.partition("@")[0])
    if make is None or not callable(measure):
        known = ", ".join(_KNOWN)
        allowed = f"a Metric(fn, higher_is_better), or a function called one of {known}"
        raise UserError(f"measure: {name}", measure, allowed)
    return make(measure)


def _rowwise(make: Callable[..., Metric], both: RowMeasure) -> Metric:
    return make(lambda model, batch: both(model, batch)[0], with_rows=both)


def _of_outputs(
    make: Callable[..., Metric],
    apply: Apply,
    measure: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> Metric:
    """A metric from ``measure(outputs, targets, mask)`` of ``(inputs, targets)``."""

    def both(model, batch):
        inputs, targets = batch.rows
        outputs = predict(apply, model, inputs)
        return measure(outputs, targets, _mask(batch, outputs))

    return _rowwise(make, both)


def evaluate(
    metrics: Mapping[str, Metric], model: PyTree, batch: Batch
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The numbers of one client, and the rows of those metrics that have them."""
    values, rows = {}, {}
    for name, metric in metrics.items():
        if metric.with_rows is None:
            values[name] = metric(model, batch)
        else:
            values[name], rows[name] = metric.with_rows(model, batch)
    return values, rows


@gate(loss=FUNCTION)
def mean_loss(loss: Loss) -> Metric:
    """The mean of a loss."""

    def measure(model, batch):
        losses = loss(model, batch.rows)
        return _mean_and_rows(losses, _mask(batch, losses))

    return _rowwise(_loss, measure)


@gate(apply=FUNCTION)
def accuracy(apply: Apply) -> Metric:
    """The fraction of rows whose class is right.

    The class is the largest score; where there is a single score, a positive one says
    class 1 (targets 0 and 1, or -1 and 1). A score that is NaN is neither right nor
    wrong: the accuracy is NaN as well.
    """

    def measure(scores, targets, mask):
        if scores.ndim == 1 or scores.shape[1] == 1:
            right = (_margin(scores) > 0) == (targets > 0)
        else:
            right = scores.argmax(axis=1) == targets
        return _mean_and_rows(_unless_nan(right, scores), mask)

    return _of_outputs(_fraction_of_rows, apply, measure)


@gate(apply=FUNCTION)
def next_token_accuracy(apply: Apply) -> Metric:
    """The fraction of places of all sequences whose next token is right.

    Scores are [rows, length, classes]; places with a negative target do not count.
    """

    def measure(scores, targets, mask):
        right = _unless_nan(scores.argmax(axis=2) == targets, scores)
        mask = mask[:, None] & (targets >= 0)
        value, places = _mean(right, mask), mask.sum(axis=1)
        # A row counts by its places: it brings more, the more of them it has.
        total = jnp.where(mask, right, 0).sum(axis=1) - value * places
        scale = (places > 0).sum() / jnp.maximum(places.sum(), 1)
        return value, jnp.where(places > 0, value + total * scale, jnp.nan)

    return _of_outputs(_fraction_of_rows, apply, measure)


@gate(apply=FUNCTION)
def auc(apply: Apply) -> Metric:
    """The area under the ROC curve, exactly; a tie counts one half.

    It is the chance that a row of class 1 scores higher than one of class 0. The
    score is the single one, or with two classes the second less the first.
    """

    def measure(outputs, targets, mask):
        scores = _margin(outputs)
        positive, negative = mask & (targets > 0), mask & (targets <= 0)
        rivals = negative.sum()
        # Infinity moves the rows that do not count to the end, past all rivals.
        ordered = jnp.sort(jnp.where(negative, scores, jnp.inf))
        below = jnp.searchsorted(ordered, scores, side="left")
        not_above = jnp.minimum(jnp.searchsorted(ordered, scores, "right"), rivals)
        won = (below + not_above).astype(scores.dtype) / 2 / jnp.maximum(rivals, 1)
        defined = (rivals > 0) & ~jnp.any(mask & jnp.isnan(scores))
        value = jnp.where(defined, _mean(won, positive), jnp.nan)
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
        return value, jnp.where(mask, brings, jnp.nan)

    return _of_outputs(_fraction, apply, measure)


@gate(apply=FUNCTION)
def mean_squared_error(apply: Apply) -> Metric:
    """The squared error, averaged over rows and outputs."""

    def measure(outputs, targets, mask):
        gaps = jnp.square(outputs.reshape(targets.shape) - targets)
        gaps = gaps.reshape(gaps.shape[0], -1).mean(axis=1)
        return _mean_and_rows(gaps, mask)

    return _of_outputs(_loss, apply, measure)


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
            return _mean_and_rows(_unless_nan(found, scores), mask)
        hits = (jnp.take_along_axis(targets, top, axis=1) > 0).sum(axis=1)
        labels = (targets > 0).sum(axis=1)
        part = _unless_nan(hits / jnp.maximum(labels, 1), scores)
        return _mean_and_rows(part, mask & (labels > 0))

    return _of_outputs(_fraction_of_rows, apply, measure)


def standard(kind: str, loss: Loss, apply: Apply) -> dict[str, Metric]:
    """The usual metrics of a task, by the kind of its targets."""
    kinds = {
        "classes": {"accuracy": accuracy(apply)},
        "binary": {"accuracy": accuracy(apply), "auc": auc(apply)},
        "regression": {"mse": mean_squared_error(apply)},
        "sequence": {"accuracy": next_token_accuracy(apply)},
        "tags": {"recall@5": recall_at(apply, 5)},
    }
    words(*kinds)("metrics: kind", kind)
    return {"loss": mean_loss(loss)} | kinds[kind]


def _margin(scores: jax.Array) -> jax.Array:
    """The single score of every row, or the second less the first."""
    if scores.ndim == 1 or scores.shape[1] == 1:
        return scores.reshape(scores.shape[0])
    return scores[:, 1] - scores[:, 0]


def _mask(batch: Batch, rows: jax.Array) -> jax.Array:
    """The rows that count, as booleans."""
    if batch.mask is None:
        return jnp.ones(rows.shape[:1], bool)
    return batch.mask.astype(bool)


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over the rows that count, whatever stands in the others."""
    count = mask.sum()
    total = jnp.where(mask, values, 0).sum()
    return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)


def _mean_and_rows(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _mean(values, mask), jnp.where(mask, values, jnp.nan)


def _unless_nan(right: jax.Array, scores: jax.Array) -> jax.Array:
    """Ones and zeros; NaN where a score is."""
    unknown = jnp.isnan(scores).any(axis=tuple(range(right.ndim, scores.ndim)))
    return jnp.where(unknown, jnp.nan, right.astype(scores.dtype))


class Spread(NamedTuple):
    """A metric over clients.

    ``weighted`` weighs clients by their rows, ``std`` is over clients,
    ``worst_tenth`` is the mean over the worst tenth of them (one at least), and
    ``clients`` is how many have a value at all.
    """

    mean: float
    weighted: float
    std: float
    worst_tenth: float
    worst: float
    best: float
    clients: int


@gate(higher_is_better=FLAG)
def over_clients(
    values: np.ndarray, counts: np.ndarray, higher_is_better: bool
) -> Spread:
    """Summarize one value for every client.

    >>> spread = over_clients(np.array([0.5, 1.0]), np.array([30, 10]), True)
    >>> spread.mean, spread.weighted, spread.worst
    (0.75, 0.625, 0.5)
    """
    values = np.asarray(values, np.float64)
    counts = np.asarray(counts, np.float64)
    if counts.shape != values.shape:
        allowed = f"one for each of the {len(values)} clients"
        raise UserError("counts", counts, allowed, f"an array of {len(counts)}")
    known = ~np.isnan(values)
    values, counts = values[known], counts[known]
    if not values.size:
        return Spread(*[float("nan")] * 6, clients=0)
    ordered = np.sort(values)[:: 1 if higher_is_better else -1]
    total = counts.sum()
    with np.errstate(invalid="ignore"):  # a diverged client's loss is infinite
        return Spread(
            mean=float(values.mean()),
            weighted=float(values @ counts / total) if total else float("nan"),
            std=float(values.std()),
            worst_tenth=float(ordered[: max(len(ordered) // 10, 1)].mean()),
            worst=float(ordered[0]),
            best=float(ordered[-1]),
            clients=len(ordered),
        )

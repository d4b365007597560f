# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A metric: a function of a model and one client's rows, and its spread over clients.

Statistics over clients are NumPy; clients with NaN are left out.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.checks import FLAG, gate
from fedblend.core import Batch, PyTree
from fedblend.errors import UserError
from fedblend.mixing import Apply, predict

Measure = Callable[[PyTree, Batch], jax.Array]
"""``measure(model, batch)``: a number for one client, NaN where it is not defined."""
RowMeasure = Callable[[PyTree, Batch], tuple[jax.Array, jax.Array]]
"""``measure(model, batch)``: the number, and the numbers of rows whose mean it is."""
RowValues = Callable[[jax.Array, jax.Array], jax.Array]
"""``values(outputs, targets)``: the number of each row."""
WeightedMeasure = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""``measure(outputs, targets, weights)``: the number; a row counts by its weight."""
Counts = Callable[[jax.Array], jax.Array]
"""``counts(targets)``: the rows with a target."""


@dataclasses.dataclass(frozen=True)
class RowByRow:
    """A ``RowMeasure`` in two steps, of which the model is in the first alone.

    So one model for all clients can go over the rows of all of them at once, however
    many each of them has.
    """

    say: Callable[[PyTree, PyTree], jax.Array]
    """``say(model, rows)``: an entry for every row, which no other row changes."""
    finish: Callable[[jax.Array, PyTree, jax.Array], tuple[jax.Array, jax.Array]]
    """``finish(said, rows, mask)``: the number of a client, and those of its rows."""

    def __call__(self, model: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Both steps."""
        said = self.say(model, batch.rows)
        return self.finish(said, batch.rows, row_mask(batch, said))


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
    mean_of_rows: bool = False
    """Whether the number is the mean of what each row has by itself: then one row of n
    moves it by at most 1/n of the largest number that a row can have."""
    always_defined: bool = True
    """Whether the number is known wherever there are rows: a ranking needs both
    classes."""

    def __call__(self, model: PyTree, batch: Batch) -> jax.Array:
        """The number alone."""
        return self.fn(model, batch)


mean_error = partial(Metric, higher_is_better=False, mean_of_rows=True)
"""The mean of errors or losses of single rows."""
bounded_error = partial(mean_error, bounded=True)
root_error = partial(Metric, higher_is_better=False)
"""Without bound, and no mean over rows."""
calibration = partial(Metric, higher_is_better=False, bounded=True)
"""From 0 to 1, and no mean over rows."""
explained = partial(Metric, higher_is_better=True, always_defined=False)
"""At most 1, and not defined where targets do not vary."""
fraction_of_rows = partial(
    Metric, higher_is_better=True, bounded=True, counts_rows=True, mean_of_rows=True
)
score = partial(Metric, higher_is_better=True, bounded=True)
"""From 0 to 1, and no mean over rows."""
ranking = partial(score, always_defined=False)
"""How well scores order the rows: not defined where all rows are of one class."""


def mean_of_rows(
    make: Callable[..., Metric],
    apply: Apply,
    values: RowValues,
    counts: Counts | None = None,
) -> Metric:
    """A metric that is the mean of ``values`` over the rows that count."""

    def finish(outputs, rows, mask):
        return mean_and_rows(values(outputs, rows[1]), _count(counts, rows[1], mask))

    return metric_of_rows(make, RowByRow(_predict(apply), finish))


def mean_of_all(
    make: Callable[..., Metric],
    apply: Apply,
    measure: WeightedMeasure,
    counts: Counts | None = None,
) -> Metric:
    """A metric of all rows together; a row brings its pseudo-value.

    That is the number, and how it changes with the weight of the row. The mean over
    rows is the number, and its standard error that of the number (the infinitesimal
    jackknife; for the area under the curve DeLong et al., 1988).
    """

    def finish(outputs, rows, mask):
        mask = _count(counts, rows[1], mask)
        wide = jnp.promote_types(outputs.dtype, jnp.float32)
        known = jax.value_and_grad(lambda weights: measure(outputs, rows[1], weights))
        value, slopes = known(mask.astype(wide))
        return value, jnp.where(mask, value + mask.sum() * slopes, jnp.nan)

    return metric_of_rows(make, RowByRow(_predict(apply), finish))


def _count(counts: Counts | None, targets: jax.Array, mask: jax.Array) -> jax.Array:
    return mask if counts is None else mask & counts(targets)


def _predict(apply: Apply) -> Callable[[PyTree, PyTree], jax.Array]:
    return lambda model, rows: predict(apply, model, rows[0])


def metric_of_rows(make: Callable[..., Metric], both: RowMeasure) -> Metric:
    """A metric from a function that has the number and those of rows."""
    return make(lambda model, batch: both(model, batch)[0], with_rows=both)


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


def margin(scores: jax.Array) -> jax.Array:
    """The single score of every row, or the second less the first."""
    if scores.ndim == 1 or scores.shape[1] == 1:
        return scores.reshape(scores.shape[0])
    return scores[:, 1] - scores[:, 0]


def is_binary(scores: jax.Array) -> bool:
    """Whether there is a single score for each row, or one for each of two classes."""
    return scores.ndim == 1 or scores.shape[1] <= 2


def row_mask(batch: Batch, rows: jax.Array) -> jax.Array:
    """The rows that count, as booleans."""
    if batch.mask is None:
        return jnp.ones(rows.shape[:1], bool)
    return batch.mask.astype(bool)


def mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted mean; whatever stands where the weight is zero, NaN too."""
    total = (weights * jnp.where(weights > 0, values, 0)).sum()
    return ratio(total, weights.sum())


def ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
    """``part / whole``, NaN where the whole is zero."""
    return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), jnp.nan)


def mean_and_rows(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean over the rows that count, and their values."""
    return mean(values, mask), jnp.where(mask, values, jnp.nan)


def unless_nan(right: jax.Array, scores: jax.Array) -> jax.Array:
    """Ones and zeros; NaN where a score is."""
    unknown = jnp.isnan(scores).any(axis=tuple(range(right.ndim, scores.ndim)))
    return jnp.where(unknown, jnp.nan, right.astype(scores.dtype))


ORDER = (
    "log_loss",  # is measured where it is asked for, and then decides
    *("accuracy", "mse", "recall", "auc", "balanced_accuracy", "average_precision"),
    *("rmse", "mae", "r2", "brier", "calibration_error", "calibration_gap"),
)
"""The metrics in the order in which tables show them; the first is the main one."""


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
def client_spread(
    values: np.ndarray, counts: np.ndarray, higher_is_better: bool
) -> Spread:
    """Summarize one value for every client.

    >>> spread = client_spread(np.array([0.5, 1.0]), np.array([30, 10]), True)
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


def main_first(metrics: Iterable[str]) -> list[str]:
    """The main one of these metrics, then the others, then the loss.

    Metrics that begin with the loss are in no order of their own; of others the first
    is the main one.

    >>> main_first(["loss", "auc", "recall@5"])
    ['recall@5', 'auc', 'loss']
    >>> main_first(["auc", "loss", "accuracy"])
    ['auc', 'accuracy', 'loss']
    """
    found = list(metrics)
    others = [name for name in found if name != "loss"]
    if found[:1] == others[:1]:
        return others + (["loss"] if "loss" in found else [])
    kinds = {name: name.partition("@")[0] for name in others}
    order = [*ORDER, *kinds.values()]
    others.sort(key=lambda name: order.index(kinds[name]))
    return others + (["loss"] if "loss" in found else [])

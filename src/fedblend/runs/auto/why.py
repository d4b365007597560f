# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Why a client differs: its gap to the shared model, in parts.

The shared model of the *other* clients predicts the rows of a client. Its loss falls in
steps, each a model that contains the one before:

- *columns*: columns that look wrong at this client are mended: one in another unit is
  divided by its factor, one with a single value becomes the mean of all;
- *level*: the client's own intercept;
- *slopes*: its own slopes, shrunk to the shared ones.

Intercept and slopes are fitted on four fifths of the client's rows and judged on the
rest, in turn, so that what only fits noise gains nothing. A part is *clear* at 5 %
after Holm's correction for all clients and parts: a level by its likelihood ratio, the
others where their gains over rows are above zero.

Columns are looked at without the target. A column has one value at a client where the
other clients' values would give that by chance less than once in 10,000 tables. It is
in another unit where its median and its quartiles' distance are both larger (or
smaller) by the same factor than at the other clients, by more than these differ among
themselves, and its values are nearer to theirs when divided by that factor. A column
with one value at many clients describes clients, and is no fault.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from fedblend.config.build import Built
from fedblend.data.preprocess.columns import SCALED
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.runs.auto.linear import PooledRows, losses, one_model
from fedblend.runs.auto.tuning import scale_rows
from fedblend.stats.intervals import LEVEL, holm

PARTS: tuple[str, ...] = ("columns", "level", "slopes")
"""The steps, each of which lowers the loss."""
FOLDS = 5
FEWEST = 10
"""Rows of a client that is looked at."""
LEFT_OUT = 20
"""So many clients, or fewer, are each left out of the model that judges them; of more,
one is a small part of the model for all."""
PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""On own slopes, of standardized inputs; that of an own intercept is the first."""
CHANCE = 1e-4
"""Of a column that is called constant by chance, in a whole table."""
OF_CLIENTS = 0.2
"""A column with one value at a larger part of clients describes clients."""
LEAST_FACTOR, SIGNED_FACTOR = 1.8, 3.0
"""Of a unit; of a column that has both signs, whose median says nothing."""
FAR = 4.0
"""Standard errors by which a unit differs from those of other clients."""
SPREAD = 0.1
"""The least difference between clients, of logarithms."""
ALIKE = 0.35
"""By which the logarithms of both factors of a unit may differ."""
VALUES = 10
"""Different values of a column that has a unit."""
NEARER = 0.2
"""By how much the values of a unit are nearer to those of other clients when divided by
its factor, in Kolmogorov's distance."""


class Fault(NamedTuple):
    """A column that looks wrong at a client."""

    column: str
    what: str
    """"unit", "constant" or "missing"."""
    value: float
    """The factor of the unit, or the single value."""
    places: tuple[int, ...]
    """The inputs that the column makes."""

    def __str__(self) -> str:
        if self.what == "missing":
            return f"{self.column} is missing in all rows"
        if self.what == "constant":
            return f"{self.column} has one value only, {self.value:.4g}"
        size = f"{self.value:.3g} times as large as"
        if self.value < 1:
            size = f"{1 / self.value:.3g} times smaller than"
        return f"{self.column} is {size} elsewhere, as in another unit"


class ClientGap(NamedTuple):
    """Why one client differs."""

    client: str
    rows: int
    loss: float
    """Of the shared model of the other clients, mean over the client's rows."""
    parts: dict[str, float]
    """By how much each step lowers the loss: "columns", "level", "slopes"."""
    clear: list[str]
    """The parts that are above chance."""
    faults: list[Fault]

    def __str__(self) -> str:
        said = [str(fault) for fault in self.faults]
        names = {"level": "its level", "slopes": "its slopes"}
        clear = sorted(names.keys() & {*self.clear}, key=lambda one: -self.parts[one])
        said += [
            f"{names[part]} (own: {self.parts[part]:.3g} of {self.loss:.3g})"
            for part in clear
        ]
        return "; ".join(said) or "nothing beyond chance"


def explain_gaps(
    kind: str,
    rows: PooledRows,
    outputs: int,
    names: Sequence[str],
    preprocessing: Preprocessing | None,
    ridge: float = 1e-3,
    fewest: int = FEWEST,
    going: Callable[[], bool] = lambda: True,
) -> list[ClientGap]:
    """Why each client differs from the others, of those with enough rows.

    Args:
        kind: of the target.
        rows: of all clients.
        outputs: scores of a row.
        names: of the clients.
        preprocessing: what made the inputs; without it columns are not looked at.
        ridge: penalty on the slopes of the shared model.
        fewest: rows of a client that is looked at.
        going: False when no more clients may be looked at.
    """
    if not going():
        return []
    penalty = np.full((outputs, rows.inputs.shape[1]), ridge * len(rows.targets))
    penalty[:, 0] = 0.0
    faults = find_faults(rows, preprocessing) if preprocessing else {}

    def fit(kept: np.ndarray) -> np.ndarray:
        pooled = PooledRows(
            rows.inputs[kept], rows.targets[kept], np.array([kept.sum()])
        )
        model = one_model(kind, pooled, outputs, penalty.ravel())
        return model.reshape(outputs, -1)

    everybody = np.ones(len(rows.targets), bool)
    shared = fit(everybody) if len(rows.counts) > LEFT_OUT else None
    found, tests = [], []
    for client, at in enumerate(rows.clients):
        if rows.counts[client] < fewest:
            continue
        if not going():
            break
        others = shared
        if others is None:
            kept = everybody.copy()
            kept[at] = False
            others = fit(kept)
        own = faults.get(client, [])
        steps, ratio = _losses_in_steps(kind, rows, at, others, own)
        gains = -np.diff(steps, axis=0)
        parts = dict(zip(PARTS, gains.mean(axis=1).tolist(), strict=True))
        columns, level, slopes = map(_above_chance, gains)
        tests.append([columns, min(level, ratio), slopes])
        loss = float(steps[0].mean())
        found.append(ClientGap(names[client], len(steps[0]), loss, parts, [], own))
    clear = holm(np.ravel(tests)).reshape(len(found), len(PARTS)) < LEVEL
    return [
        gap._replace(clear=[PARTS[place] for place in np.flatnonzero(of)])
        for gap, of in zip(found, clear, strict=True)
    ]


def fitted_rows(built: Built) -> PooledRows:
    """The rows of all splits together, with targets in the unit of training."""
    return scale_rows(built.task, *built.federated_data.splits.values())


def _above_chance(gains: np.ndarray) -> float:
    """The one-sided p-value that gains of rows are above zero on average."""
    spread = gains.std(ddof=1) / np.sqrt(len(gains))
    return float(stats.t.sf(gains.mean() / spread, len(gains) - 1)) if spread else 1.0


def _losses_in_steps(
    kind: str, rows: PooledRows, at: slice, shared: np.ndarray, faults: list[Fault]
) -> tuple[np.ndarray, float]:
    """Losses of a client's rows: shared, columns mended, own level, own slopes.

    And the p-value of the level by its likelihood ratio.
    """
    inputs, targets = rows.inputs[at].copy(), rows.targets[at]
    found = [losses(kind, inputs @ shared.T, targets)]
    for fault in faults:
        for place in fault.places:
            inputs[:, 1 + place] = fault_free(inputs[:, 1 + place], fault, rows, at)
    offset = inputs @ shared.T
    found.append(losses(kind, offset, targets))
    if found[1].mean() > found[0].mean():
        # What looks wrong is right, or is of no use: nothing is mended.
        inputs, found[1] = rows.inputs[at], found[0]
        offset = inputs @ shared.T
    level = _cross_validate(kind, inputs[:, :1], targets, offset, PENALTIES[0])
    found.append(level)
    own = [_cross_validate(kind, inputs, targets, offset, one) for one in PENALTIES]
    # Where no amount of own slopes is better, there are none.
    found.append(min([level, *own], key=np.mean))
    return np.stack(found), _level_test(kind, inputs[:, :1], targets, offset)


def _level_test(
    kind: str, ones: np.ndarray, targets: np.ndarray, offset: np.ndarray
) -> float:
    """The p-value of an own intercept by its likelihood ratio."""
    rows, outputs = PooledRows(ones, targets, np.array([len(ones)])), offset.shape[1]
    level = one_model(kind, rows, outputs, np.full(outputs, 1e-6), offset=offset)
    before, after = (
        losses(kind, scores, targets).sum() for scores in (offset, offset + level)
    )
    ratio = 2 * (before - after)
    if kind == "regression":  # the variance is as unknown as the level
        ratio = len(targets) * np.log(before / max(after, 1e-300))
    freedom = max(outputs - 1, 1) if kind == "classes" else outputs
    return float(stats.chi2.sf(ratio, freedom))


def fault_free(
    values: np.ndarray, fault: Fault, rows: PooledRows, at: slice
) -> np.ndarray:
    """Values of an input at a client, mended."""
    others = np.delete(rows.inputs[:, 1 + fault.places[0]], np.r_[at])
    if fault.what != "unit":
        return np.full_like(values, others.mean())
    # Median and spread of the others; the same as a factor, whatever is standardized.
    (low, middle, high), (a, b, c) = (
        np.quantile(of, (0.25, 0.5, 0.75)) for of in (values, others)
    )
    return b + (values - middle) * (c - a) / max(high - low, 1e-12)


def _cross_validate(
    kind: str,
    inputs: np.ndarray,
    targets: np.ndarray,
    offset: np.ndarray,
    penalty: float,
) -> np.ndarray:
    """Losses of rows by models of the other folds, which are added to the offset."""
    found, outputs = np.empty(len(targets)), offset.shape[1]
    every = np.full(inputs.shape[1], penalty)
    every[0] = PENALTIES[0]
    # The best model is in the span of the rows: no more dimensions than these count.
    inputs = inputs / np.sqrt(every)
    if len(inputs) < inputs.shape[1]:
        inputs = np.linalg.qr(inputs.T)[1].T
    ones = np.ones(outputs * inputs.shape[1])
    for fold in range(FOLDS):
        held = np.arange(len(targets)) % FOLDS == fold
        train = PooledRows(inputs[~held], targets[~held], np.array([(~held).sum()]))
        model = one_model(kind, train, outputs, ones, offset=offset[~held])
        scores = offset[held] + inputs[held] @ model.reshape(outputs, -1).T
        found[held] = losses(kind, scores, targets[held])
    return found


def find_faults(
    rows: PooledRows, preprocessing: Preprocessing
) -> dict[int, list[Fault]]:
    """Columns that look wrong, by client.

    Args:
        rows: of all clients.
        preprocessing: what made their inputs.
    """
    found: dict[int, list[Fault]] = {}
    inputs, first = rows.inputs[:, 1:], 0
    columns = preprocessing.schema.kept
    chance = CHANCE / (len(columns) * len(rows.counts))
    for column, fitted in zip(columns, preprocessing.fitted, strict=True):
        places = tuple(range(first, first + len(column.features)))
        first += len(places)
        scaled = column.encoding in SCALED
        scale, values = fitted.deviation if scaled else 1.0, inputs[:, list(places)]
        for client, value in _constants(rows, values, chance):
            shown = fitted.mean + scale * value if scaled else value
            if abs(shown) < 1e-5 * scale:  # of 32 bits
                shown = 0.0
            # What is missing is the mean.
            what = "missing" if scaled and value == 0.0 else "constant"
            fault = Fault(column.name, what, float(shown), places)
            found.setdefault(client, []).append(fault)
        if scaled:
            raw = fitted.mean + scale * values[:, 0]
            present = values[:, 0] != 0.0  # what is missing is the mean
            for client, factor in _units(rows, raw, present):
                fault = Fault(column.name, "unit", factor, places[:1])
                found.setdefault(client, []).append(fault)
    return found


def _constants(
    rows: PooledRows, values: np.ndarray, chance: float
) -> list[tuple[int, float]]:
    """The clients for whom a column has one value, which chance does not explain."""
    same = [
        client
        for client, at in enumerate(rows.clients)
        if 1 < at.stop - at.start < len(values) and not np.ptp(values[at], axis=0).any()
    ]
    found, described = [], len(same)
    for client in same:
        at = rows.clients[client]
        others = np.delete(values, np.r_[at], axis=0)
        # How often another client's row has its most frequent value.
        share = np.unique(others, axis=0, return_counts=True)[1].max() / len(others)
        if rows.counts[client] * np.log(share) < np.log(chance):
            found.append((client, float(values[at][0, 0])))
    return found if described <= max(1, OF_CLIENTS * len(rows.counts)) else []


def _units(
    rows: PooledRows, raw: np.ndarray, present: np.ndarray
) -> list[tuple[int, float]]:
    """The clients for whom a column is in another unit, and its factor."""
    parts = [raw[at][present[at]] for at in rows.clients]
    large = np.array([len(part) >= FEWEST for part in parts])
    if large.sum() < 3:
        return []
    quarters = np.array(
        [
            np.quantile(part, (0.25, 0.5, 0.75)) if enough else (np.nan,) * 3
            for part, enough in zip(parts, large, strict=True)
        ]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.log(quarters[:, 2] - quarters[:, 0])
        middle = np.log(np.abs(quarters[:, 1]))
    signed = np.mean(raw < 0) > 0.01 and np.mean(raw > 0) > 0.01
    found = []
    for client in np.flatnonzero(np.isfinite(spread)):
        others = np.isfinite(spread)
        others[client] = False
        if others.sum() < 2:
            continue
        away = spread[client] - np.median(spread[others])
        usual = 1.4826 * np.median(np.abs(spread[others] - np.median(spread[others])))
        error = 1.2 * np.sqrt(1 / len(parts[client]) + 1 / sum(map(len, parts)))
        if abs(away) < FAR * np.hypot(max(usual, SPREAD), error):
            continue
        moved = middle[client] - np.median(middle[others])
        least, factor = LEAST_FACTOR, float(np.exp((moved + away) / 2))
        if signed:
            least, factor = SIGNED_FACTOR, float(np.exp(away))
        elif abs(moved - away) > ALIKE + 2 * error:
            continue
        if abs(np.log(factor)) < np.log(least) or len(set(parts[client])) < VALUES:
            continue
        elsewhere = np.concatenate(
            [part for at, part in enumerate(parts) if others[at]]
        )
        tests: list[Any] = [
            stats.ks_2samp(values, elsewhere)
            for values in (parts[client], parts[client] / factor)
        ]
        if tests[0].statistic - tests[1].statistic > NEARER:
            found.append((int(client), factor))
    return found

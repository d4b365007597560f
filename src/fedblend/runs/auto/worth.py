# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What training together is worth, in rows: training alone would need so many times.

Training alone is repeated on parts of each client's training rows, which gives its
learning curve: the mean over clients and splits of the test loss L for the part f. The
curve is extended by::

    L(f) = floor + slope * f^-power

with the power of ``POWERS`` that fits best. The worth of a method is the part m at
which L(m) is the method's loss; 1 is training alone. The interval resamples clients, or
splits where clients are few, and fits again, so that it is wide where the curve is flat
or noisy. A curve is not extended beyond ``MOST`` times the rows that were there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedblend.data.dataset import Task, generator
from fedblend.runs.auto.linear import PooledRows
from fedblend.runs.auto.tuning import AnySplit, Split, measure, predict
from fedblend.runs.auto.verdict import FEW_CLIENTS

PARTS = (0.25, 0.35, 0.5, 0.7, 1.0)
"""Of a client's training rows."""
POWERS = (0.5, 0.75, 1.0, 1.5)
MOST = 10.0
SAMPLES = 400
"""Of the bootstrap."""
ENDS = (0.025, 0.975)


class Worth(NamedTuple):
    """Times as many rows as training alone would need; at most ``MOST``."""

    times: float
    low: float
    high: float

    def __str__(self) -> str:
        def say(times: float) -> str:
            return f"more than {MOST:.0f}" if times >= MOST else f"{times:.1f}"

        if self.high - self.low < 0.05:
            return f"{say(self.times)} times the rows"
        ends = f"{say(self.low)} to {say(self.high)}"
        return f"{say(self.times)} times the rows ({ends})"


def shorten(rows: PooledRows, part: float, seed: int) -> PooledRows:
    """A part of each client's rows, of the same order for every part."""
    draw = generator(seed, "rows of a learning curve")
    kept = np.zeros(len(rows.targets), bool)
    for at, count in zip(rows.clients, rows.counts, strict=True):
        some = draw.permutation(int(count))[: round(part * int(count))]
        kept[at.start + some] = True
    return rows.take(kept)


def learning_curve(
    task: Task,
    name: str,
    splits: Sequence[AnySplit],
    setting: Mapping[str, float],
    going: Callable[[], bool] = lambda: True,
) -> np.ndarray | None:
    """Test losses of a linear method by parts of the rows, [parts, splits, clients].

    Splits are the first ones that there is time for; None without any.

    Args:
        task: what is predicted.
        name: of the method.
        splits: to train on, and to test.
        setting: of the method.
        going: False when no more models may be trained.
    """
    curves = []
    for seed, split in enumerate(splits):
        train, held, curve = split.train, split.held, []
        for part in PARTS:
            if not going():
                return np.stack(curves, axis=1) if curves else None
            shorter = [Split(shorten(train, part, seed), held)]
            scores = predict(task, name, shorter, setting)
            loss, *_ = measure(task, shorter, scores).values()
            curve.append(loss[0])
        curves.append(np.stack(curve))
    return np.stack(curves, axis=1)


def worth_in_rows(curve: np.ndarray, method: np.ndarray) -> Worth:
    """The rows that a method is worth, with a 95 % interval.

    Args:
        curve: losses of training alone, [parts, splits, clients]; the last part is 1.
        method: losses of the method, [splits, clients].
    """
    splits = min(curve.shape[1], len(method))
    known = np.isfinite(method[:splits]).all(axis=0)
    known &= np.isfinite(curve[:, :splits]).all(axis=(0, 1))
    curve, method = curve[:, :splits, known], method[:splits, known]
    clients = curve.shape[2]
    if not clients:
        return Worth(1.0, 0.0, MOST)
    draw = generator(0, "bootstrap of a learning curve")
    found = []
    for _ in range(SAMPLES):
        if clients >= FEW_CLIENTS:
            some = draw.integers(clients, size=clients)
            found.append(_times(curve[:, :, some], method[:, some]))
        else:
            some = draw.integers(splits, size=splits)
            found.append(_times(curve[:, some], method[some]))
    low, high = np.quantile(found, ENDS)
    times = _times(curve, method)
    return Worth(times, min(float(low), times), max(float(high), times))


def _times(curve: np.ndarray, method: np.ndarray) -> float:
    means, wanted = curve.mean(axis=(1, 2)), float(method.mean())
    best, fit = np.inf, (means[-1], 0.0, 1.0)
    for power in POWERS:
        design = np.stack([np.ones(len(PARTS)), np.array(PARTS) ** -power], axis=1)
        (floor, slope), *_ = np.linalg.lstsq(design, means, rcond=None)
        missed = ((design @ (floor, slope) - means) ** 2).sum()
        if slope > 0 and missed < best:
            best, fit = missed, (floor, slope, power)
    floor, slope, power = fit
    # Through the last point, which is training alone as it is.
    floor = means[-1] - slope
    if wanted <= floor:
        return MOST
    if not slope:
        return 1.0 if wanted >= means[-1] else MOST
    return float(min(((wanted - floor) / slope) ** (-1 / power), MOST))

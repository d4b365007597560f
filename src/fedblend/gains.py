# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What clients gain by one model over another, and how sure that is.

Both models are measured on the same test rows of a client, so the rows are paired: its
gain is the mean of their differences, and its 95 % interval comes from these alone.

Right or wrong: of n rows m are discordant, right by one model and wrong by the other.
Whether these fall on one side is the exact test of McNemar; its Clopper-Pearson bounds,
times those of m/n, are the interval. So it excludes zero where the exact test does at
5 %, and is not empty where no row is discordant. Everything else: Student's t.

Seeds: the test rows of their splits overlap, so the errors of their gains may be fully
dependent. The widths are averaged, not shrunk, which bounds the error of a mean under
any dependence; what the gains differ by between seeds is added by Student's t.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedblend.metrics import Metric

Measured = dict[str, dict[str, dict[str, np.ndarray]]]
"""``{split: {model: {metric: values over the measured clients}}}``."""
REFERENCES = ("local", "shared")
"""What a personal model is compared with, training alone first."""
TAIL = 0.025
"""How much of a distribution lies beyond either end of an interval."""
_BISECTIONS = 40
_MOST_FREEDOM = 10_000


class Gain(NamedTuple):
    """What each client gains, with the ends of its 95 % interval; mean over seeds.

    NaN where there is nothing to compare; an end is infinite where rows leave it open.
    ``not_finite`` are the clients that have rows and whose own model has no finite
    value on them, ``unmatched`` those of the others whose rival has none.
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    not_finite: np.ndarray
    unmatched: np.ndarray
    mean: tuple[float, float, float]
    """The mean over clients, and the ends of its interval over clients and seeds."""

    @property
    def harmed(self) -> np.ndarray:
        """Whose interval lies below zero."""
        return self.high < 0

    @property
    def helped(self) -> np.ndarray:
        """Whose interval lies above zero."""
        return self.low > 0


class GainSummary(NamedTuple):
    """How many clients gain and lose; every report reads these numbers.

    ``count`` clients are harmed, a ``share`` of the ``clients`` that were compared:
    their intervals lie below zero. They lose ``mean_loss`` on average and ``worst`` at
    most. If no client were harmed, at most ``by_chance`` would be counted on average.
    ``worse`` and ``better`` count the gains by their sign alone.
    """

    count: int
    share: float
    mean_loss: float
    worst: float
    by_chance: float
    helped: int
    clients: int
    not_finite: int
    unmatched: int
    worse: int
    better: int
    mean_gain: float
    mean_gain_low: float
    mean_gain_high: float


def gain_summary(gain: Gain) -> GainSummary:
    """Count the clients of a comparison."""
    known = int((~np.isnan(gain.value)).sum())
    lost = -gain.value[gain.harmed]
    bounded = np.isfinite(gain.high) & ~np.isnan(gain.value)
    return GainSummary(
        count=len(lost),
        share=len(lost) / known if known else float("nan"),
        mean_loss=float(lost.mean()) if lost.size else 0.0,
        worst=float(lost.max(initial=0.0)),
        by_chance=round(TAIL * int(bounded.sum()), 6),
        helped=int(gain.helped.sum()),
        clients=known,
        not_finite=int(gain.not_finite.sum()),
        unmatched=int(gain.unmatched.sum()),
        worse=int((gain.value < 0).sum()),
        better=int((gain.value > 0).sum()),
        mean_gain=gain.mean[0],
        mean_gain_low=gain.mean[1],
        mean_gain_high=gain.mean[2],
    )


class Sides(NamedTuple):
    """Two models of the same clients in one seed: the values of a metric, and by rows.

    Rows are [clients, rows], NaN where a row does not count, or None where only the
    values are known; ``broken`` are the clients whose own model is not finite.
    """

    own: np.ndarray
    other: np.ndarray
    broken: np.ndarray
    rows: tuple[np.ndarray, np.ndarray] | None = None


def gain(metric: Metric, seeds: Sequence[Sides], counts: np.ndarray) -> Gain:
    """The gain of every client, whichever way the metric is better.

    Args:
        metric: what was measured.
        seeds: both models, in each seed.
        counts: the clients' rows.

    >>> from fedblend.metrics import accuracy
    >>> metric = accuracy(lambda params, inputs: inputs)
    >>> own, other = np.array([[1.0] * 9]), np.array([[0.0] * 9])
    >>> values = np.array([1.0]), np.array([0.0])
    >>> sides = Sides(*values, np.array([False]), rows=(own, other))
    >>> found = gain(metric, [sides], np.array([9]))
    >>> found.value, found.low.round(2), found.high
    (array([1.]), array([0.22]), array([1.]))
    """
    sign = 1 if metric.higher_is_better else -1
    has_rows = counts > 0
    not_finite = has_rows & np.any([side.broken for side in seeds], axis=0)
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.stack(
            [sign * (side.own.astype(float) - side.other) for side in seeds]
        )
        own = np.isfinite([side.own for side in seeds]).all(axis=0)
        gaps = np.where(np.isfinite(gaps).all(axis=0) & ~not_finite, gaps, np.nan)
        ends = [
            _ends(side, gap, counts, sign, metric.counts_rows)
            for side, gap in zip(seeds, gaps, strict=True)
        ]
        value = gaps.mean(axis=0)
        shifts = _between_seeds(gaps)
        down, up = (
            np.hypot(np.mean([abs(end[place]) for end in ends], axis=0), shifts)
            for place in (0, 1)
        )
    low, high = value - down, value + up
    if metric.bounded:
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    rival = np.isfinite([side.other for side in seeds]).all(axis=0)
    unmatched = has_rows & own & ~rival & ~not_finite
    mean = _over_clients(gaps, (low, high))
    return Gain(value, low, high, not_finite, unmatched, mean)


class Evidence(NamedTuple):
    """Measured values for comparing the models of every client.

    ``measured`` and ``by_row`` have an entry for each seed; the latter is what
    single rows contribute, [clients, rows], empty where that is not known. ``counts``
    are the clients' rows in each split, ``metrics`` what was measured.
    """

    measured: Sequence[Measured]
    by_row: Sequence[Measured]
    counts: Mapping[str, np.ndarray]
    metrics: Mapping[str, Metric]

    def of_replica(self, replica: int) -> "Evidence":
        """That of one replica."""
        one = slice(replica, replica + 1)
        return self._replace(measured=self.measured[one], by_row=self.by_row[one])

    def others(self, split: str) -> list[str]:
        """The models to compare the personal one with: all that are not the same.

        NaN everywhere does not make two models the same.
        """
        replicas = [splits[split] for splits in self.measured if split in splits]
        known = replicas[0] if replicas and "personal" in replicas[0] else {}

        def same(other: str) -> bool:
            pairs = [
                (values, models[other][metric])
                for models in replicas
                for metric, values in models["personal"].items()
            ]
            equal = all(np.array_equal(*pair, equal_nan=True) for pair in pairs)
            return equal and any(np.isfinite(values).any() for values, _ in pairs)

        return [name for name in REFERENCES if name in known and not same(name)]

    def gain(self, split: str, metric: str, other: str) -> Gain:
        """What every client gains by its personal model over the other one."""
        counts = np.asarray(self.counts[split])
        seeds = []
        for replica, splits in enumerate(self.measured):
            models = splits[split]
            own = models["personal"]
            # The mean loss is known wherever there are rows; an area may well not be.
            defined = self.metrics[metric].always_defined
            known = own.get("loss", own[metric] if defined else None)
            broken = np.isinf(own[metric])
            if known is not None:
                broken = broken | ~np.isfinite(known)
            rows = self.by_row[replica].get(split, {}) if self.by_row else {}
            paired = [rows.get(name, {}).get(metric) for name in ("personal", other)]
            seeds.append(
                Sides(
                    np.asarray(own[metric], np.float64),
                    np.asarray(models[other][metric], np.float64),
                    broken & (counts > 0),
                    None if any(side is None for side in paired) else tuple(paired),  # type: ignore
                )
            )
        return gain(self.metrics[metric], seeds, counts)


def harms(evidence: Evidence) -> dict[str, Any]:
    """The clients whose personal model is worse than another, by split and metric.

    ``than_local`` compares with training alone, ``than_shared`` with the shared model;
    each is a ``GainSummary`` as plain values, over all seeds of the evidence. Where the
    personal model is the other one there is nothing to compare.
    """
    return {
        split: {
            name: {
                f"than_{other}": gain_summary(
                    evidence.gain(split, name, other)
                )._asdict()
                for other in evidence.others(split)
            }
            for name in models["personal"]
        }
        for replica in evidence.measured[:1]
        for split, models in replica.items()
    }


def _ends(
    side: Sides, gap: np.ndarray, counts: np.ndarray, sign: int, counted: bool
) -> tuple[np.ndarray, np.ndarray]:
    """How far the ends of one seed's interval lie below and above its gain."""
    if side.rows is None:
        places = _unpaired(side, counts) if counted else None
        if places is None:
            nothing_known = np.where(np.isnan(gap), np.nan, np.inf)
            return nothing_known, nothing_known
        better, worse, rows = places
        return _counted_ends(better, worse, rows, gap)
    own, other = (np.asarray(rows, float) for rows in side.rows)
    pairs = sign * (own - other)
    known = ~np.isnan(pairs)
    rows = known.sum(axis=1)
    if counted and np.isin(pairs[known], (-1.0, 0.0, 1.0)).all():
        return _counted_ends((pairs > 0).sum(1), (pairs < 0).sum(1), rows, gap)
    center = np.where(known, pairs, 0).sum(axis=1) / np.maximum(rows, 1)
    squares = np.where(known, pairs - center[:, None], 0) ** 2
    error = np.sqrt(squares.sum(axis=1) / np.maximum(rows - 1, 1) / np.maximum(rows, 1))
    half = np.array([_student(int(n) - 1) for n in rows]) * error
    half = np.where(np.isnan(gap), np.nan, np.where(rows > 1, half, np.inf))
    return half, half


def _unpaired(side: Sides, counts: np.ndarray):
    """Better, worse and all rows if pairs overlap as little as the values allow.

    Single rows are not known here; the fewest that both models may have right make the
    most discordant ones, and the widest interval.
    """
    right, rivals = (np.nan_to_num(v * counts) for v in (side.own, side.other))
    whole = [np.rint(many) for many in (right, rivals)]
    if max(abs(right - whole[0]).max(), abs(rivals - whole[1]).max()) > 1e-3:
        return None
    both = np.maximum(whole[0] + whole[1] - counts, 0)
    return whole[0] - both, whole[1] - both, counts


def _counted_ends(better, worse, rows, gap) -> tuple[np.ndarray, np.ndarray]:
    """The interval of a mean of ones, zeros and minus ones; see the module's text."""
    discordant = better + worse
    least, most = _binomial(discordant, rows)
    low, high = (2 * side - 1 for side in _binomial(better, discordant))
    lower = low * np.where(low < 0, most, least)
    upper = high * np.where(high > 0, most, least)
    # The bounds hold the gain itself; rounding may not push it out.
    return np.maximum(gap - lower, 0), np.maximum(upper - gap, 0)


def _between_seeds(gaps: np.ndarray) -> np.ndarray | float:
    """What the seeds' disagreement adds to an interval of their mean; first axis."""
    seeds = len(gaps)
    if seeds < 2:
        return 0.0
    return _student(seeds - 1) * gaps.std(axis=0, ddof=1) / np.sqrt(seeds)


def _over_clients(gaps: np.ndarray, ends) -> tuple[float, float, float]:
    """The mean over clients, and its interval over clients and over seeds."""
    gaps = gaps[:, ~np.isnan(gaps).any(axis=0)]
    clients = gaps.shape[1]
    if not clients:
        return float("nan"), float("nan"), float("nan")
    mean = float(gaps.mean())
    if clients == 1:
        low, high = (float(end[~np.isnan(end)][0]) for end in ends)
        return mean, low, high
    error = gaps.mean(axis=0).std(ddof=1) / np.sqrt(clients)
    half = np.hypot(_student(clients - 1) * error, _between_seeds(gaps.mean(axis=1)))
    return mean, float(mean - half), float(mean + half)


def _binomial(hits: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clopper and Pearson's bounds of a probability, from hits in so many trials."""
    pairs = np.stack([hits, trials, trials - hits], axis=1).astype(np.int64)
    found, places = np.unique(pairs, axis=0, return_inverse=True)
    hits, trials, misses = found.T
    high = np.where(misses == 0, 1.0, _upper(hits, trials))
    low = np.where(hits == 0, 0.0, 1 - _upper(misses, trials))
    return low[places.ravel()], high[places.ravel()]


def _upper(hits: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """The probability at which so few hits or fewer are as rare as the tail."""
    most = int(trials.max(initial=0))
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
    number = np.arange(most + 1)
    misses = trials[:, None] - number
    choices = logs[trials][:, None] - logs[number] - logs[np.maximum(misses, 0)]
    choices = np.where(number <= hits[:, None], choices, -np.inf)
    low, high = np.zeros(len(hits)), np.ones(len(hits))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        chance = np.exp(
            choices
            + number * np.log(middle)[:, None]
            + misses * np.log1p(-middle)[:, None]
        ).sum(axis=1)
        low, high = (
            np.where(chance > TAIL, middle, low),
            np.where(chance > TAIL, high, middle),
        )
    return high


@lru_cache
def _student(freedom: int) -> float:
    """Student's t that is exceeded with the probability of one tail.

    With t = sqrt(freedom) tan(angle) the density is a power of the cosine.
    """
    freedom = min(max(freedom, 1), _MOST_FREEDOM)
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(1 - 2 * TAIL, area / area[-1], angles)
    return float(np.sqrt(freedom) * np.tan(angle))

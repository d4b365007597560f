# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Gains of clients by one model over another, with intervals.

Both models are measured on the same test rows of a client, so the rows are paired: its
gain is the mean of their differences, and its 95 % interval (``intervals``) comes from
these alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedblend.metrics import Metric
from fedblend.stats.intervals import (
    TAIL,
    PairedValues,
    error_sources,
    half_width,
    interval_ends,
)

Measured = dict[str, dict[str, dict[str, np.ndarray]]]
"""``{split: {model: {metric: values over the measured clients}}}``."""
REFERENCES = ("local", "shared")
"""What a personal model is compared with, training alone first."""


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
        """Clients whose interval lies below zero."""
        return self.high < 0

    @property
    def helped(self) -> np.ndarray:
        """Clients whose interval lies above zero."""
        return self.low > 0


class GainSummary(NamedTuple):
    """How many clients gain and lose; every report reads these numbers.

    ``count`` clients are harmed, a ``share`` of the ``clients`` that were compared:
    their intervals lie below zero. They lose ``mean_loss`` on average and ``worst`` at
    most. If no client were harmed, at most ``by_chance`` would be counted in 95 % of
    such comparisons of independent clients.
    ``worse`` and ``better`` count the gains by their sign alone.
    """

    count: int
    share: float
    mean_loss: float
    worst: float
    by_chance: int
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
    from scipy.special import bdtr

    known = int((~np.isnan(gain.value)).sum())
    lost = -gain.value[gain.harmed]
    judged = int(np.isfinite(gain.high + gain.value).sum())
    chances = bdtr(np.arange(judged), judged, TAIL)
    return GainSummary(
        count=len(lost),
        share=len(lost) / known if known else float("nan"),
        mean_loss=float(lost.mean()) if lost.size else 0.0,
        worst=float(lost.max(initial=0.0)),
        by_chance=int((chances < 1 - 2 * TAIL).sum()),
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


def gain(metric: Metric, seeds: Sequence[PairedValues], counts: np.ndarray) -> Gain:
    """The gain of every client, whichever way the metric is better.

    Args:
        metric: what was measured.
        seeds: both models, in each seed. Without ``numbers``, rows at the same place
            are the same, and seeds share at least a fifth of their rows.
        counts: the clients' rows.

    >>> from fedblend.metrics import accuracy
    >>> metric = accuracy(lambda params, inputs: inputs)
    >>> own, other = np.array([[1.0] * 9]), np.array([[0.0] * 9])
    >>> values = np.array([1.0]), np.array([0.0])
    >>> sides = PairedValues(*values, np.array([False]), rows=(own, other))
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
        value = gaps.mean(axis=0)
        down, up = interval_ends(seeds, gaps, counts, sign, metric.counts_rows)
    low, high = value - down, value + up
    if metric.bounded:
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    rival = np.isfinite([side.other for side in seeds]).all(axis=0)
    unmatched = has_rows & own & ~rival & ~not_finite
    mean = _client_mean(gaps, (low, high))
    return Gain(value, low, high, not_finite, unmatched, mean)


class Evidence(NamedTuple):
    """Measured values for comparing the models of every client.

    ``measured`` and ``by_row`` have an entry for each seed; the latter is what
    single rows contribute, [clients, rows], empty where that is not known. ``counts``
    are the clients' rows in each split, ``metrics`` what was measured. ``numbers`` tell
    which rows these are, [seeds, clients, rows], or [1, clients, rows] where all seeds
    have the same ones; splits for which that is not known are left out.
    """

    measured: Sequence[Measured]
    by_row: Sequence[Measured]
    counts: Mapping[str, np.ndarray]
    metrics: Mapping[str, Metric]
    numbers: Mapping[str, np.ndarray] = {}

    def pick(self, replica: int) -> "Evidence":
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
        seeds, numbers = [], self.numbers.get(split)
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
                PairedValues(
                    np.asarray(own[metric], np.float64),
                    np.asarray(models[other][metric], np.float64),
                    broken & (counts > 0),
                    None if any(side is None for side in paired) else tuple(paired),  # type: ignore
                    None if numbers is None else numbers[replica % len(numbers)],
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


def _client_mean(gaps: np.ndarray, ends) -> tuple[float, float, float]:
    """The mean over clients, and its interval over clients and over seeds."""
    gaps = gaps[:, ~np.isnan(gaps).any(axis=0)]
    clients = gaps.shape[1]
    if not clients:
        return float("nan"), float("nan"), float("nan")
    mean = float(gaps.mean())
    if clients == 1:
        low, high = (float(end[~np.isnan(end)][0]) for end in ends)
        return mean, low, high
    half = half_width(error_sources(gaps))
    return mean, mean - half, mean + half

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Survival: times until an event, some of which are only known to be longer.

*Targets* are times, with a minus sign where they are *censored*: the row was last seen
without the event. A censored time of 0 is -0.0.

*Cox's model* has the hazard h(t) exp(score), with a hazard h of each client that its
*partial likelihood* does not need: for every event, the chance that of all rows at risk
it was this one. Ties are Breslow's: events at the same time share their rows at risk.

Reference: Graf et al., "Assessment and comparison of prognostic classification schemes
for survival data", Statistics in Medicine 18, 1999, for the integrated Brier score.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def write_targets(times: np.ndarray, events: np.ndarray) -> np.ndarray:
    """Targets from times and where the event was seen."""
    return np.copysign(times, np.where(events, 1.0, -1.0))


def read_targets(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times, and where the event was seen."""
    return np.abs(targets), ~np.signbit(targets)


class RiskSets:
    """Rows of one client in order of time, and who is at risk at each event."""

    def __init__(self, targets: np.ndarray):
        times, events = read_targets(targets)
        self.order = np.argsort(times, kind="stable")
        self.events = np.flatnonzero(events[self.order])
        self.times = times[self.order][self.events]
        """Of the events."""
        self.first = np.searchsorted(times[self.order], self.times)
        """The first row that is at risk at each event."""
        self.last = float(times.max(initial=0.0))
        """When the last row was seen."""

    def _sums_at_risk(self, values: np.ndarray) -> np.ndarray:
        """Sums over the rows at risk at each event; rows are in order of time."""
        return np.cumsum(values[::-1], axis=0)[::-1][self.first]

    def _log_totals(self, scores: np.ndarray) -> np.ndarray:
        """The logarithm of the sum of exp(score) at risk at each event."""
        backward = np.logaddexp.accumulate(scores[self.order][::-1])
        return backward[::-1][self.first]

    def loss(self, scores: np.ndarray) -> float:
        """Minus the logarithm of the partial likelihood."""
        return (self._log_totals(scores) - scores[self.order][self.events]).sum()

    def derivatives(
        self, scores: np.ndarray, inputs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Gradient and Hessian of ``loss`` in the coefficients of inputs."""
        away = scores[self.order]
        risk = np.exp(away - away.max(initial=-np.inf))
        total, ordered = self._sums_at_risk(risk), inputs[self.order]
        means = self._sums_at_risk(risk[:, None] * ordered) / total[:, None]
        hazard = np.cumsum(np.bincount(self.first, 1 / total, minlength=len(risk)))
        slope = (means - ordered[self.events]).sum(axis=0)
        return slope, (ordered.T * (risk * hazard)) @ ordered - means.T @ means

    def survival(self, scores: np.ndarray) -> np.ndarray:
        """Breslow's survival, after each event, of a row whose score is 0."""
        return np.exp(-np.cumsum(np.exp(-self._log_totals(scores))))


def kaplan_meier(times: np.ndarray, events: np.ndarray) -> np.ndarray:
    """The times of events, and the chance to be without one after each.

    >>> seen = np.array([True, True, False, True])
    >>> kaplan_meier(np.array([1, 2, 2, 3]), seen)
    array([[1.  , 2.  , 3.  ],
           [0.75, 0.5 , 0.  ]])
    """
    points, seen = np.unique(times[events], return_counts=True)
    at_risk = len(times) - np.searchsorted(np.sort(times), points)
    return np.stack([points, np.cumprod(1 - seen / at_risk)])


def survive(curve: np.ndarray, times: np.ndarray, side: Any = "right") -> np.ndarray:
    """The chance to be without an event at these times; "left" is just before them."""
    points, chances = curve
    return np.append(1.0, chances)[np.searchsorted(points, times, side)]


def concordance(scores: np.ndarray, targets: np.ndarray) -> float:
    """Harrell's C: how often the row with the earlier event of two scores higher.

    A tie of scores counts one half; NaN where no two rows can be compared.
    """
    times, events = read_targets(targets)
    when, gaps = times[events][:, None], scores[events][:, None] - scores
    # Who is censored at the time of an event was there for longer.
    later = (when < times) | ((when == times) & ~events)
    right = (np.sign(gaps[later]) + 1) / 2
    return float(right.mean()) if right.size else float("nan")


def integrated_brier(
    survival: Callable[[np.ndarray], np.ndarray],
    targets: np.ndarray,
    known: np.ndarray,
) -> float:
    """The integrated Brier score of rows, weighted by who is not censored yet.

    Args:
        survival: chances to be without the event at some times, [rows, times]; they
            jump where training rows have an event.
        targets: of the rows.
        known: targets of training rows, whose censoring is Kaplan-Meier's, and of which
            nine in ten are seen for no longer than the last time that counts.
    """
    (times, events), (before, seen) = read_targets(targets), read_targets(known)
    last = np.quantile(before, 0.9, method="lower")
    grid = np.unique(np.concatenate([[0.0], before, times]))
    grid, censoring = grid[grid < last], kaplan_meier(before, ~seen)
    if not grid.size or not times.size:
        return float("nan")
    least, chances = 1 / len(before), survival(grid)
    stay = np.maximum(survive(censoring, grid), least)
    stayed = np.maximum(survive(censoring, times, "left"), least)
    gone = (events / stayed)[:, None] * chances**2
    errors = np.where(times[:, None] > grid, (1 - chances) ** 2 / stay, gone)
    return float(errors.mean(axis=0) @ np.diff(grid, append=last) / last)

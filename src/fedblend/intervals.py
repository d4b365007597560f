# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Quantiles for 95 % intervals, in NumPy alone."""

from functools import lru_cache

import numpy as np

TAIL = 0.025
"""How much of a distribution lies beyond either end of an interval."""
_BISECTIONS = 40
_MOST_FREEDOM = 10_000


def binomial(hits: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    ways = logs[trials][:, None] - logs[number] - logs[np.maximum(misses, 0)]
    ways = np.where(number <= hits[:, None], ways, -np.inf)
    low, high = np.zeros(len(hits)), np.ones(len(hits))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        chance = np.exp(
            ways
            + number * np.log(middle)[:, None]
            + misses * np.log1p(-middle)[:, None]
        ).sum(axis=1)
        low, high = (
            np.where(chance > TAIL, middle, low),
            np.where(chance > TAIL, high, middle),
        )
    return high


@lru_cache
def student(freedom: int) -> float:
    """Student's t that is exceeded with the probability of one tail.

    With t = sqrt(freedom) tan(angle) the density is a power of the cosine.
    """
    freedom = min(max(freedom, 1), _MOST_FREEDOM)
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(1 - 2 * TAIL, area / area[-1], angles)
    return float(np.sqrt(freedom) * np.tan(angle))

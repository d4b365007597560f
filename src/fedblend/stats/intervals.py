# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Intervals and p-values of what one model gains over another.

**One client, from its rows.** Right or wrong: of n rows m are discordant, right by one
model and wrong by the other. Whether these fall on one side is the exact test of
McNemar; its Clopper-Pearson bounds, times those of m/n, are the interval. So it
excludes zero where the exact test does at 5 %, and is not empty where no row is
discordant. Everything else: Student's t.

Seeds: a row that several of them test is one unit. The squares of the rows' sums over
seeds, compared with those of single differences, say how many independent rows all
seeds together are worth: as many as one seed has where all test the same rows with the
same result, and the sum of all where they test other rows. The interval is that of so
many rows (Korn and Graubard, 1998). What the gains of seeds differ by more than their
rows explain is due to training; it is added by Student's t.

**The mean over clients.** Its p-value inverts its interval: it is the level at which
the interval just reaches zero. So p < 0.05 where the 95 % interval excludes zero, and
table and figure never disagree. With one seed it is the paired t-test over clients.
Clients are units because a claim about a method is one about further clients; seeds add
their own spread, which a test over clients alone would not see. The signed-rank test
asks for the median and not for the mean that tables show, and sign flips of a few
clients cannot reach 5 % after a correction, however large the difference.

**Many comparisons.** Holm's step-down bounds the chance of a single false claim among
all of them at 5 %, whatever their dependence; runs that share clients are dependent.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

TAIL = 0.025
"""How much of a distribution lies beyond either end of an interval."""
SHARED = 0.2
"""Part of the rows that two splits are taken to share where that is not known."""


class PairedValues(NamedTuple):
    """Two models of the same clients in one seed: the values of a metric, and by rows.

    Rows are [clients, rows], NaN where a row does not count, or None where only the
    values are known; ``broken`` are the clients whose own model is not finite.
    ``numbers``, [clients, rows], are equal in two seeds where these test the same row.
    """

    own: np.ndarray
    other: np.ndarray
    broken: np.ndarray
    rows: tuple[np.ndarray, np.ndarray] | None = None
    numbers: np.ndarray | None = None


def interval_ends(
    seeds: Sequence[PairedValues],
    gaps: np.ndarray,
    counts: np.ndarray,
    sign: int,
    counted: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """How far the ends of the clients' intervals lie below and above their gains.

    Args:
        seeds: both models, in each seed.
        gaps: the gains, [seeds, clients].
        counts: the clients' rows.
        sign: 1 where more of the metric is better, else -1.
        counted: whether a row is right or wrong.
    """
    value, rows = gaps.mean(axis=0), [side.rows for side in seeds]
    if any(pair is None for pair in rows):
        found = _ends_by_values(seeds, value, counts, counted)
        shift = seed_spread(gaps)
    else:
        pairs = sign * np.diff(np.array(rows, float)[:, ::-1], axis=1)[:, 0]
        found, explained = _ends_by_rows(seeds, pairs, value, counted)
        shift = seed_spread(gaps, explained)
    down, up = (np.hypot(end, shift) for end in found)
    return down, up


def _ends_by_rows(
    seeds: Sequence[PairedValues], pairs: np.ndarray, value: np.ndarray, counted: bool
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The ends from the rows' differences, and how much these make seeds differ."""
    many, known = len(seeds), ~np.isnan(pairs)
    rows = known.sum(axis=2)
    centers = np.where(known, pairs, 0).sum(axis=2) / np.maximum(rows, 1)
    errors = np.where(known, pairs - centers[..., None], 0)
    variance = (errors**2).sum(axis=(0, 2)) / np.maximum((rows - 1).sum(axis=0), 1)
    part, rows = _part(seeds, errors, known), rows.mean(axis=0)
    explained = variance / rows * (1 - part) * many / max(many - 1, 1)
    if counted and np.isin(pairs[known], (-1.0, 0.0, 1.0)).all():
        better, worse = ((of.sum(axis=2).mean(axis=0)) for of in (pairs > 0, pairs < 0))
        found = _count_ends(better / part, worse / part, rows / part, value)
        return found, explained
    half = student(rows / part - 1) * np.sqrt(variance * part / rows)
    half = np.where(rows > 1, half, np.inf) + 0 * value
    return (half, half), explained


def _part(
    seeds: Sequence[PairedValues], errors: np.ndarray, known: np.ndarray
) -> np.ndarray:
    """One over the number of independent rows that each row of a seed stands for.

    Args:
        seeds: which rows were tested in each.
        errors: of the rows' differences, [seeds, clients, rows].
        known: which of them count.
    """
    many, clients, _ = errors.shape
    least = 1 / many
    known_rows = [side.numbers for side in seeds if side.numbers is not None]
    if len(known_rows) < many:
        known_rows, least = [np.arange(errors.shape[2])], least + (1 - least) * SHARED
    numbers = np.broadcast_to(known_rows, errors.shape)
    width = int(numbers.max(initial=0)) + 1
    units, places = np.unique(
        (np.arange(clients)[:, None] * width + numbers)[known], return_inverse=True
    )
    sums = np.bincount(places.ravel(), errors[known], len(units))
    together = np.bincount(units // width, sums**2, clients)
    apart = many * (errors**2).sum(axis=(0, 2))
    return np.where(apart > 0, np.clip(together / apart, least, 1), 1)


def _ends_by_values(
    seeds: Sequence[PairedValues], value: np.ndarray, counts: np.ndarray, counted: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The ends if pairs overlap as little as the values allow.

    Single rows are not known here; the fewest that both models may have right make the
    most discordant ones, and the widest interval, as if all seeds tested the same rows.
    """
    right = np.nan_to_num([(side.own * counts, side.other * counts) for side in seeds])
    whole = np.rint(right)
    if not counted or abs(right - whole).max(initial=0) > 1e-3:
        nothing_known = np.where(np.isnan(value), np.nan, np.inf)
        return nothing_known, nothing_known
    both = np.maximum(whole.sum(axis=1, keepdims=True) - counts, 0)
    better, worse = (whole - both).mean(axis=0)
    return _count_ends(better, worse, counts, value)


def _count_ends(better, worse, rows, gap) -> tuple[np.ndarray, np.ndarray]:
    """The interval of a mean of ones, zeros and minus ones; see the module's text."""
    discordant = better + worse
    least, most = _binomial(discordant, rows)
    low, high = (2 * side - 1 for side in _binomial(better, discordant))
    lower = low * np.where(low < 0, most, least)
    upper = high * np.where(high > 0, most, least)
    # The bounds hold the gain itself; rounding may not push it out.
    return np.maximum(gap - lower, 0), np.maximum(upper - gap, 0)


def seed_spread(gaps: np.ndarray, explained: Any = 0.0) -> np.ndarray | float:
    """What the seeds' disagreement adds to an interval of their mean; first axis.

    Args:
        gaps: the gains of the seeds.
        explained: the variance between seeds that the interval has already.
    """
    seeds = len(gaps)
    if seeds < 2:
        return 0.0
    more = np.maximum(gaps.var(axis=0, ddof=1) - explained, 0)
    return student(seeds - 1) * np.sqrt(more / seeds)


def _binomial(hits: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clopper and Pearson's bounds of a probability, from hits in so many trials."""
    from scipy.special import betaincinv

    misses, little = trials - hits, 1e-9
    low = betaincinv(np.maximum(hits, little), misses + 1, TAIL)
    high = betaincinv(hits + 1, np.maximum(misses, little), 1 - TAIL)
    return np.where(hits > little, low, 0.0), np.where(misses > little, high, 1.0)


def student(freedom: Any) -> Any:
    """Student's t that is exceeded with the probability of one tail."""
    from scipy.special import stdtrit

    return stdtrit(np.maximum(freedom, 1), 1 - TAIL)


LEVEL = 0.05
"""The chance of a false claim that is accepted, of all comparisons together."""
_LEAST = -700.0
"""The smallest logarithm of a p-value."""


def error_sources(gaps: np.ndarray, overlap: float = 0.0) -> list[tuple[int, float]]:
    """Degrees of freedom and standard error of a mean of differences: clients, seeds.

    Args:
        gaps: the differences, [seeds, clients].
        overlap: rows held out over rows trained on, where seeds are splits of the same
            rows; their errors are not independent (Nadeau and Bengio, 2003).
    """
    seeds, clients = gaps.shape
    found = []
    if clients > 1:
        found.append((clients - 1, gaps.mean(axis=0).std(ddof=1) / np.sqrt(clients)))
    if seeds > 1:
        error = gaps.mean(axis=1).std(ddof=1) * np.sqrt(1 / seeds + overlap)
        found.append((seeds - 1, error))
    return found


def half_width(sources: Sequence[tuple[int, float]], level: float = LEVEL) -> float:
    """Half of the interval of a mean with these errors; infinite without any."""
    from scipy.special import stdtrit

    if not sources:
        return float("inf")
    ends = [error * stdtrit(free, level / 2) for free, error in sources]
    return float(np.hypot.reduce(ends))


def p_value(gaps: np.ndarray) -> float:
    """Of the mean of differences, [seeds, clients]; see the module's text.

    NaN for a single client, and where all differ by the very same amount: no spread, no
    test.

    >>> round(p_value(np.array([[1.0, 2.0, 3.0]])), 4)
    0.0742
    """
    if gaps.size and not gaps.any():
        return 1.0
    if gaps.shape[1] < 2:
        return float("nan")
    return p_of_mean(abs(float(gaps.mean())), error_sources(gaps))


def p_of_mean(mean: float, sources: Sequence[tuple[int, float]]) -> float:
    """The level at which the interval of a mean just reaches zero; NaN without errors.

    Args:
        mean: above zero.
        sources: its degrees of freedom and standard errors.
    """
    from scipy.optimize import brentq
    from scipy.special import stdtr

    # Rounding leaves a spread where there is none.
    sources = [(free, e) for free, e in sources if e > 1e-12 * mean]
    if not sources:
        return float("nan")
    if len(sources) == 1:
        freedom, error = sources[0]
        return float(2 * stdtr(freedom, -mean / error))

    def beyond(log: float) -> float:
        """How far the interval at a level reaches beyond zero."""
        return half_width(sources, np.exp(log)) - mean

    if beyond(_LEAST) < 0:
        return float(np.exp(_LEAST))
    log: float = brentq(beyond, _LEAST, 0.0, xtol=1e-12)  # pyright: ignore
    return float(np.exp(log))


def holm(p: Sequence[float] | np.ndarray, tests: int = 0) -> np.ndarray:
    """Holm's correction; what could not be tested is NaN and does not count.

    ``tests`` is the number of all tests, where only the best of them are known.

    >>> holm([0.01, 0.04, 0.03]).round(3)
    array([0.03, 0.06, 0.06])
    """
    values = np.asarray(p, float)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    steps = values[order] * (max(tests, len(order)) - np.arange(len(order)))
    corrected = np.full(values.shape, np.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How long to train alone: until more rounds improve nothing on held-out rows.

Held-out rows are evaluated after 1, 2, 3, ... rounds, in the end after every fifth more
than before. Training goes on for ``least`` rounds, and until twice as many rounds as
before improve the score by less than a hundredth: of the improvement so far, and of the
score itself. Then the best round counts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fedblend.metrics import Metric

HELD_OUT = 0.2
"""Part of every client's training rows that decides where it has no validation rows."""
LEAST = 20
"""Rounds that are tried at least, however short the run that is compared with."""
MOST = 20
"""How many times the least are tried at most."""
LITTLE = 0.01


class Look(NamedTuple):
    """Scores on held-out rows after some rounds, of which more is better."""

    round: int
    score: float
    second: float = 0.0
    """Decides between equal scores."""


class Budget(NamedTuple):
    """How long every client trains alone, and how that was chosen."""

    rounds: int | None
    """None if every client has its own number."""
    chosen_on: str | None = None
    """Which rows chose it; None if it was asked for."""
    metric: str | None = None
    tried: int | None = None
    """Rounds that were tried to choose."""
    improving: bool = False
    """Whether more rounds than were tried might still improve."""


def looks() -> Iterator[int]:
    """The rounds after which held-out rows are evaluated.

    >>> from itertools import islice
    >>> list(islice(looks(), 12))
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14]
    """
    at = 0
    while True:
        at += max(1, at // 5)
        yield at


def least_rounds(rounds: int) -> int:
    """How many rounds are tried at least, beside a run of so many."""
    return max(rounds, LEAST)


def score(metric: Metric, value: float) -> float:
    """A value of a metric as a score, of which more is better; NaN is the worst."""
    sign = 1 if metric.higher_is_better else -1
    return -math.inf if math.isnan(value) else sign * value


def settled(seen: Sequence[Look], least: int) -> bool:
    """Whether more rounds improve nothing."""
    now = seen[-1].round
    if now < least:
        return False
    before = max(look.score for look in seen if look.round <= now / 2)
    best = best_of(seen).score
    if not math.isfinite(before):
        return not math.isfinite(best)
    improvement = best - seen[0].score
    return best - before <= LITTLE * min(improvement, abs(before))


def over(seen: Sequence[Look], least: int) -> bool:
    """Whether training ends here: more rounds improve nothing, or may not be tried."""
    return settled(seen, least) or seen[-1].round >= MOST * least


def best_of(seen: Sequence[Look]) -> Look:
    """The best look, the first of equal ones."""
    return max(seen, key=lambda look: (look.score, look.second))


def chosen(seen: Sequence[Look], least: int, rows: str, metric: str) -> Budget:
    """The best number of rounds; the least where no score is finite."""
    best = best_of(seen)
    if not math.isfinite(best.score):
        return Budget(least)
    improving = not settled(seen, least)
    return Budget(best.round, rows, metric, seen[-1].round, improving)

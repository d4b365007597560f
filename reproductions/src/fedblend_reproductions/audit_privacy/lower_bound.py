# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From guesses to a lower bound on epsilon, with a confidence.

In a game that is (e, d)-private no guess is right more often than (exp(e) + d) / (1 +
exp(e)), and among confident guesses, whatever makes one confident, the rates per game
obey ``right <= exp(e) wrong + d``. Three rates are bounded by Clopper and Pearson, so
that all three hold together with the confidence that is asked for: that of right
guesses, and those of confident guesses that are right and wrong. They demand of every d
an epsilon, ``Rates.epsilon``, of any mechanism.

At a small d that takes many games: the best attack is rarely right by itself. But an
accountant promises an epsilon for every d at once. If one of these promises does not
hold for some noise, then it is refuted for that noise and more, and no epsilon may be
promised that is not above the one for that noise, ``least_promise``. For a Gaussian
mechanism this is the bound by a mu-estimate of Nasr et al.; it holds for whatever
mechanism the accountant is for.

Games of one run have common noise of no effect on each other, if the mechanism does
what it promises. Where they agree more than by chance, they count as fewer games (Korn
and Graubard).

Reference: Kairouz, Oh, Viswanath, "The composition theorem for differential privacy",
ICML 2015; Jagielski, Ullman, Oprea, "Auditing differentially private machine learning",
NeurIPS 2020, arXiv:2006.07709; Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini,
Terzis, "Tight auditing of differentially private machine learning", USENIX Security
2023, arXiv:2302.07956; Clopper, Pearson, Biometrika 1934; Korn, Graubard, "Confidence
intervals for proportions with small expected number of positive counts estimated from
survey data", Survey Methodology 1998.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LEAST, MOST = -5.0, 5.0
"""Powers of two between which the noise is looked for, in units of the planned one."""
HALVINGS = 8
"""Of that range: the noise is found to 1.4 percent, on the careful side."""
SHARES = (0.95, 0.5, 0.1)
"""Where promises are compared, as parts of the d at which no epsilon is needed."""


class Rates(NamedTuple):
    """Bounds on rates that hold together with the confidence asked for."""

    accuracy: float
    """The least rate of right guesses."""
    right: float
    """The least rate of confident and right guesses."""
    wrong: float
    """The largest rate of confident and wrong guesses."""

    def epsilon(self, delta: float) -> float:
        """The least epsilon that a mechanism with this delta can have."""
        pairs = ((self.accuracy, 1 - self.accuracy), (self.right, self.wrong))
        logs = [
            math.log((right - delta) / wrong) if right > delta and wrong > 0 else 0.0
            for right, wrong in pairs
        ]
        return max(0.0, *logs)

    @property
    def total(self) -> float:
        """The d from which on no epsilon is needed."""
        return max(2 * self.accuracy - 1, self.right - self.wrong, 0.0)


class Outcomes(NamedTuple):
    """How often something happened in each run, and in how many games."""

    happened: np.ndarray
    games: np.ndarray

    def least(self, error: float) -> float:
        """A rate that is exceeded but for this probability."""
        from scipy.stats import beta

        count, games = self._effective()
        return float(beta.ppf(error, count, games - count + 1)) if count > 0 else 0.0

    def most(self, error: float) -> float:
        """A rate that is not reached but for this probability."""
        from scipy.stats import beta

        count, games = self._effective()
        if count >= games:
            return 1.0
        return float(beta.ppf(1 - error, count + 1, games - count))

    def _effective(self) -> tuple[float, float]:
        """As many independent games as these are worth, and how often it happened."""
        count, games = float(self.happened.sum()), float(self.games.sum())
        rate = count / max(games, 1)
        if not 0 < rate < 1 or len(self.games) < 2:
            return count, games
        spread = ((self.happened - rate * self.games) ** 2).sum()
        factor = max(1.0, float(spread) / (games * rate * (1 - rate)))
        return count / factor, games / factor


def rates(
    scores: np.ndarray,
    coins: np.ndarray,
    played: np.ndarray,
    threshold: float,
    confidence: float,
) -> Rates:
    """Bounds on the rates of guesses by the sign of a score.

    Args:
        scores: [runs, canaries].
        coins: as many; the larger one is guessed where the score is positive.
        played: which of these games count.
        threshold: a guess is confident if its score is beyond. With coins of both
            signs also one below its negative; with 0 and 1 in one direction only.
        confidence: that all bounds hold together.
    """
    error, positive = 1 - confidence, coins > 0
    right = (scores > 0) == positive
    opposite = bool((coins < 0).any())
    sure = (np.abs(scores) if opposite else scores) > threshold
    guilty, innocent = played, played
    if not opposite:
        guilty, innocent = played & positive, played & ~positive

    def outcomes(happened, games):
        return Outcomes((happened & games).sum(axis=1), games.sum(axis=1))

    return Rates(
        outcomes(right, played).least(error / 2),
        outcomes(sure & right, guilty).least(error / 4),
        outcomes(sure & ~right, innocent).most(error / 4),
    )


def least_promise(
    needed: Callable[[float], float],
    total: float,
    promise: Callable[[float, float], float],
    delta: float,
) -> tuple[float, bool]:
    """The least epsilon that can be promised at ``delta``; whether it is more already.

    Args:
        needed: from a delta to the least epsilon there.
        total: the delta from which on none is needed.
        promise: from a factor of the noise and a delta to the accountant's epsilon.
        delta: of the configuration.

    Returns:
        The accountant's epsilon at the least noise that is refuted, 0 if none is, and
        whether the promise for the planned noise is refuted.
    """
    deltas = [share * total for share in (*SHARES, min(1.0, delta / max(total, delta)))]

    def refuted(power: float) -> bool:
        for place, at in enumerate(deltas):
            if needed(at) > promise(2.0**power, at):
                # What refutes one promise is likely to refute the next.
                deltas.insert(0, deltas.pop(place))
                return True
        return False

    if total <= 0:
        return 0.0, False
    broken = refuted(0.0)
    low, high = (LEAST, 0.0) if broken else (0.0, MOST)
    if not broken and not refuted(high):
        return 0.0, False
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return promise(2.0**high, delta), broken

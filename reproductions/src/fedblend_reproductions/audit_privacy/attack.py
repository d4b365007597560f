# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The attack: from what is seen of a canary in all rounds to a guess of its coin.

In units of how far one canary moves the mean at its clip, round t shows ``a_t coin +
noise_t``, where a_t is whether the canary takes part. The precision matrix P of the
noise over the rounds is learned from blocks that no canary owns, in runs that are not
played for, whatever the mechanism: independent in each round, by a tree, or otherwise.
The score of a game is the logarithm of how much more likely it is in one world than in
the other, by the product over rounds of::

    e_t = (P seen)_t / P_tt            1 - q_t + q_t exp(P_tt (coin e_t - coin^2 / 2))

and a constant for each pair of rounds. q_t is a_t where cohorts are known, and then the
score is exact for Gaussian noise; else it is the chance to take part, and the score is
exact for noise that is independent in each round. Any score whatever makes a valid
bound; a good one makes it tight.
"""

from typing import NamedTuple

import numpy as np

from fedblend_reproductions.audit_privacy.canaries import COINS, Directions

FLOOR = 1e-6
"""The least variance that is reckoned with: of noise that is missing."""


class Games(NamedTuple):
    """Everything seen in so many runs, and who took part.

    ``coins`` are [runs, canaries], ``seen`` [runs, rounds, groups, blocks] in units of
    how far a canary moves the mean, ``chances`` [runs, canaries, rounds].
    """

    coins: np.ndarray
    seen: np.ndarray
    chances: np.ndarray

    def take(self, part: slice) -> "Games":
        """Some of the runs."""
        return Games(self.coins[part], self.seen[part], self.chances[part])


class Attack(NamedTuple):
    """What the observer knows of the noise, learned beforehand."""

    weights: np.ndarray
    """Of each group, [groups]: one over the variance of its noise."""
    precision: np.ndarray
    """Of the noise over rounds, for a whole block."""
    adjacency: str

    def observed(self, games: Games, along: Directions) -> np.ndarray:
        """What is seen of each block as one number a round, [runs, blocks, rounds].

        A canary that takes part adds its coin to it.
        """
        signal = self.weights @ along.parts
        summed = np.einsum("g,rtgb->rbt", self.weights, games.seen)
        return summed / signal[:, None]

    def scores(self, seen: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """The log of the likelihood ratio of coins, of observations [..., rounds]."""
        sharp = np.diag(self.precision)
        shift = seen @ self.precision / sharp
        off, on = COINS[self.adjacency]
        both = [_log_likelihood(coin, shift, sharp, chances) for coin in (on, off)]
        apart = self.precision - np.diag(sharp)
        pairs = np.einsum("...t,ts,...s->...", chances, apart, chances)
        return (both[0] - both[1]).sum(axis=-1) - (on**2 - off**2) * pairs / 2

    def information(self, chances: np.ndarray) -> np.ndarray:
        """The squared distance of both worlds in standard deviations, of known rounds.

        With chances below 1 it is that of an average round, and the same for all.
        """
        off, on = COINS[self.adjacency]
        moved = np.einsum("...t,ts,...s->...", chances, self.precision, chances)
        return (on - off) ** 2 * moved


def learned(games: Games, along: Directions, adjacency: str) -> Attack:
    """What the blocks without an owner show of the noise in these runs."""
    free = along.parts.shape[1] // 2
    noise, parts = games.seen[..., free:], along.parts[:, free:]
    variance = (noise**2).mean(axis=(0, 1)).sum(axis=1) / parts.sum(axis=1)
    weights = 1 / np.maximum(variance, FLOOR * max(variance.max(), FLOOR))
    first = Attack(weights, np.eye(noise.shape[1]), adjacency)
    seen = first.observed(games, along)[:, free:]
    samples = seen.reshape(-1, seen.shape[-1])
    raw = samples.T @ samples / len(samples)
    # Few samples make a covariance of many rounds too sharp by chance.
    trust = max(0.0, 1 - raw.shape[0] / len(samples))
    covariance = trust * raw + (1 - trust) * np.diag(np.diag(raw))
    floor = FLOOR * np.eye(len(raw))
    return first._replace(precision=np.linalg.inv(covariance + floor))


def _log_likelihood(
    coin: float, shift: np.ndarray, sharp: np.ndarray, chances: np.ndarray
) -> np.ndarray:
    """Of each round, up to what both coins have in common."""
    with np.errstate(divide="ignore"):
        absent, present = np.log1p(-chances), np.log(chances)
    return np.logaddexp(absent, present + sharp * (coin * shift - coin**2 / 2))

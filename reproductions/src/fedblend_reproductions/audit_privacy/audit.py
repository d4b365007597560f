# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Audit the private training that a configuration describes.

The configuration is run many times, as replicas of one simulation: its own transforms,
sampling, server and noise, with canaries for clients. Each canary of each run is a
game: guess its coin from all that the run releases. A quarter of the runs teaches the
observer what the noise is like; guesses in the others make the lower bound.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from fedblend.config.build import build
from fedblend.config.config import Config
from fedblend.config.tables import privacy
from fedblend.errors import ConfigError
from fedblend.trees import precision
from fedblend_reproductions.audit_privacy import attack, lower_bound
from fedblend_reproductions.audit_privacy.attack import Attack, Games
from fedblend_reproductions.audit_privacy.canaries import COINS, Directions
from fedblend_reproductions.audit_privacy.columns import leak
from fedblend_reproductions.audit_privacy.games import OnStep, play

TRIALS = 400
"""Runs, unless the user says otherwise."""
LEARNING = 4
"""One of so many runs teaches the observer, and is not played for."""
MOST_CANARIES = 64
Promise = Callable[[float, float], float]
"""From a factor of the planned noise, and a delta, to the promised epsilon."""


class Audit(NamedTuple):
    """What was promised, and what the attack shows."""

    promised: float
    """Epsilon by the accountant, for one run."""
    delta: float
    adjacency: str
    lower: float
    """The larger of both lower bounds on epsilon."""
    any_mechanism: float
    """The lower bound that assumes nothing of the mechanism."""
    by_accountant: float
    """The least epsilon that the accountant could promise, with any other noise."""
    violated: bool
    """Whether the promise does not hold."""
    confidence: float
    trials: int
    """Runs of the configuration."""
    games: int
    """Coins that were guessed."""
    accuracy: float
    """The part of the guesses that were right."""


def audit(
    config: Config,
    *,
    trials: int = TRIALS,
    seed: int = 0,
    confidence: float = 0.95,
    canaries: int = MOST_CANARIES,
    on_step: OnStep = lambda done, rounds: None,
) -> Audit:
    """Attack the private training of a configuration, and bound its epsilon from below.

    Args:
        config: with the table ``[privacy]``; one run of it is audited.
        trials: how often it is run.
        seed: of coins and directions; the noise is the operating system's.
        confidence: that the lower bound is below the true epsilon.
        canaries: at most so many in a run; with one, no two games share a run.
        on_step: called with the rounds that were run, and all there are.

    Raises:
        ConfigError: there is no epsilon to compare with, or rows of one client change
            those of others.
    """
    config = _of_one_seed(config)
    table = config.privacy
    if table is None:
        raise ConfigError("privacy: the table is missing; there is nothing to audit")
    if not config.run.rounds:
        raise ConfigError("run.rounds: 0; without a round there is nothing to audit")
    with precision(config.run.precision):
        built = build(config)
        raw = bool(built.preprocessing)
        promise = _accountant(config, built.federated_data.clients, raw)
        # There may be none, which is to be said before anything is run.
        promise(1.0, table.delta)
        if changed := leak(config, built):
            raise ConfigError(
                f"privacy: the promise does not hold: the rows of one client change "
                f"{changed}, without noise"
            )
        games, along = play(
            config,
            built,
            trials=trials,
            seed=seed,
            canaries=canaries,
            on_step=on_step,
        )
    return judge(
        games,
        along,
        promise,
        delta=table.delta,
        adjacency=table.adjacency,
        trials=trials,
        seed=seed,
        confidence=confidence,
    )


def judge(
    games: Games,
    along: Directions,
    promise: Promise,
    *,
    delta: float,
    adjacency: str,
    trials: int,
    seed: int,
    confidence: float,
) -> Audit:
    """Guess the coins of games, and compare what this shows with what is promised.

    Args:
        games: everything that was seen.
        along: the directions of canaries.
        promise: of the accountant.
        delta: of the promised epsilon.
        adjacency: "replace_one" or "zero_out".
        trials: runs that were played, to report.
        seed: of games that are imagined.
        confidence: that the lower bound is below the true epsilon.
    """
    taught = max(2, len(games.coins) // LEARNING)
    known = attack.learned(games.take(slice(taught)), along, adjacency)
    rest = games.take(slice(taught, None))
    played = _chosen(known, rest.chances)
    decided = _threshold(known, rest.chances[played], delta, confidence, seed)
    owned = known.observed(rest, along)[:, : rest.coins.shape[1]]
    scores = known.scores(owned, rest.chances)
    found = lower_bound.rates(scores, rest.coins, played, decided, confidence)
    by_accountant, broken = lower_bound.least_promise(
        found.epsilon, found.total, promise, delta
    )
    direct, promised = found.epsilon(delta), promise(1.0, delta)
    right = (scores > 0) == (rest.coins > 0)
    return Audit(
        promised=promised,
        delta=delta,
        adjacency=adjacency,
        lower=max(direct, by_accountant),
        any_mechanism=direct,
        by_accountant=by_accountant,
        violated=broken or direct > promised,
        confidence=confidence,
        trials=trials,
        games=int(played.sum()),
        accuracy=float(right[played].mean()),
    )


def _of_one_seed(config: Config) -> Config:
    seed = config.run.seed
    first = seed[0] if isinstance(seed, list) else seed
    run = config.run.model_copy(update={"seed": first})
    return config.model_copy(update={"run": run})


def _accountant(config: Config, clients: int, raw: bool) -> Promise:
    """The promise of the accountant for a configuration."""
    table = config.privacy
    assert table is not None

    @cache
    def promise(factor: float, delta: float) -> float:
        changed = {"noise": table.noise * factor, "delta": delta}
        other = config.model_copy(update={"privacy": table.model_copy(update=changed)})
        found = privacy.report(other, clients, raw)["privacy"]
        if found["epsilon"] is None:
            raise ConfigError(
                f"privacy: {found['sentence']}; there is no epsilon to audit"
            )
        return found["epsilon"]

    return promise


def _chosen(known: Attack, chances: np.ndarray) -> np.ndarray:
    """The games to play for: those whose canaries are most exposed.

    An epsilon is promised to the client that is worst off. Where cohorts are known, all
    know beforehand which games these are: enough of the best ones to be sure, so that
    the bound to be expected is largest.
    """
    from scipy.special import ndtr, ndtri

    exposed = known.information(chances)
    order = np.sort(exposed, axis=None)[::-1]
    rate = np.cumsum(ndtr(np.sqrt(order) / 2)) / np.arange(1, order.size + 1)
    error = 2 * np.sqrt(rate * (1 - rate) / np.arange(1, order.size + 1))
    sure = ndtri(np.clip(rate - error, 0.5, 1 - 1 / np.arange(2, order.size + 2)))
    return exposed >= order[int(np.argmax(sure))] * (1 - 1e-9)


def _threshold(
    known: Attack, chances: np.ndarray, delta: float, confidence: float, seed: int
) -> float:
    """The score from which on a guess is confident, by games that are imagined.

    It maximizes the bound for any mechanism that as many games are expected to give.
    """
    draw = np.random.default_rng(seed)
    coins = draw.choice(COINS[known.adjacency], len(chances))
    root = np.linalg.cholesky(np.linalg.inv(known.precision))
    noise = draw.standard_normal(chances.shape) @ root.T
    present = draw.random(chances.shape) < chances
    scores = known.scores(coins[:, None] * present + noise, chances)
    one_run = scores[None], coins[None], np.ones((1, len(coins)), bool)

    def bound(threshold: float) -> float:
        found = lower_bound.rates(*one_run, threshold, confidence)
        return found._replace(accuracy=0.5).epsilon(delta)

    tried = np.quantile(np.abs(scores), np.linspace(0.3, 0.999, 60))
    return float(max(tried, key=bound))

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on epsilon: against closed forms, and how often they are wrong."""

from functools import cache
from math import exp, log

import numpy as np
import pytest
from scipy.optimize import bisect
from scipy.stats import binomtest, norm

from fedblend_reproductions.audit_privacy.attack import Attack, Games, learned
from fedblend_reproductions.audit_privacy.canaries import directions
from fedblend_reproductions.audit_privacy.lower_bound import (
    Outcomes,
    Rates,
    least_promise,
    rates,
)

DELTA = 1e-4


@cache
def gaussian(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism of distance mu, by its profile."""

    def excess(epsilon: float) -> float:
        near, far = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return float(norm.cdf(near) - np.exp(epsilon + norm.logcdf(far)) - delta)

    return 0.0 if excess(0.0) <= 0 else float(bisect(excess, 0.0, 700.0))  # type: ignore


def test_rates_are_bounded_as_clopper_and_pearson_do():
    alternate = np.arange(60) % 3 == 0
    single = Outcomes(alternate.astype(int), np.ones(60, int))
    exact = binomtest(20, 60).proportion_ci(0.9, "exact")
    assert single.least(0.05) == pytest.approx(exact.low)
    assert single.most(0.05) == pytest.approx(exact.high)
    never = Outcomes(np.zeros(60, int), np.ones(60, int))
    assert never.least(0.05) == 0
    assert never.most(0.05) == pytest.approx(1 - 0.05 ** (1 / 60))
    assert Outcomes(np.ones(60, int), np.ones(60, int)).most(0.05) == 1


def test_games_of_a_run_that_agree_count_as_one():
    """Ten games with one outcome a run are worth a single game of each run."""
    outcomes = (np.arange(60) % 3 == 0).astype(int)
    alone = Outcomes(outcomes, np.ones(60, int))
    copied = Outcomes(10 * outcomes, np.full(60, 10))
    assert copied.least(0.05) == pytest.approx(alone.least(0.05))
    assert copied.most(0.05) == pytest.approx(alone.most(0.05))


def test_the_epsilon_of_rates_is_that_of_the_hypothesis_test():
    accuracy = (exp(1.5) + DELTA) / (1 + exp(1.5))
    assert Rates(accuracy, 0.0, 1.0).epsilon(DELTA) == pytest.approx(1.5)
    assert Rates(0.5, 0.3, 0.02).epsilon(0.1) == pytest.approx(log(0.2 / 0.02))
    assert Rates(0.5, 0.01, 0.02).epsilon(DELTA) == 0


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("planned", [0.7, 1.0, 1.4])
def test_the_least_promise_of_a_gaussian_mechanism_is_that_of_its_accuracy(mu, planned):
    """The best guess is right with probability Phi(mu / 2), whatever was planned."""
    known = Rates(float(norm.cdf(mu / 2)), 0.0, 1.0)

    def promise(factor, delta):
        return gaussian(planned * mu / factor, delta)

    lower, broken = least_promise(known.epsilon, known.total, promise, DELTA)
    assert broken == (planned < 1)
    # The noise is found to 1.4 %, and d is compared at 95 % of the total variation.
    assert gaussian(0.95 * mu, DELTA) < lower <= gaussian(mu, DELTA) * 1.001


def test_nothing_is_shown_by_guesses_that_are_not_better_than_chance():
    nothing = Rates(0.49, 0.01, 0.02)
    assert least_promise(nothing.epsilon, nothing.total, gaussian, DELTA) == (0, False)


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_bounds_are_wrong_no_more_often_than_they_say(adjacency):
    """Games of a Gaussian mechanism, whose epsilon is known, 300 audits of them."""
    draw, mu, confidence, wrong, shares = np.random.default_rng(0), 1.2, 0.8, 0, []
    off, on = (-1.0, 1.0) if adjacency == "replace_one" else (0.0, 1.0)
    true = gaussian(mu, 0.05)
    for _ in range(300):
        coins = draw.choice([off, on], (40, 10))
        seen = (coins - (on + off) / 2) / (on - off) * mu + draw.normal(size=(40, 10))
        found = rates(seen, coins, np.ones_like(coins, bool), 0.8, confidence)
        wrong += found.epsilon(0.05) > true
        wrong += found.epsilon(0.3) > gaussian(mu, 0.3)
        shares.append(found.epsilon(0.05) / true)
    assert np.median(shares) > 0.3
    # At most a fifth of 300; at two d each, and 60 + 3 sigma is 81.
    assert wrong <= 81


def test_the_attack_learns_noise_that_is_correlated_over_rounds():
    """Its score is the logarithm of the likelihood ratio, computed otherwise."""
    draw, rounds, canaries = np.random.default_rng(1), 4, 5
    along = directions([60, 40], canaries, 3)
    root = np.tril(draw.normal(size=(rounds, rounds))) + 2 * np.eye(rounds)
    noise = np.einsum("ts,rsd->rtd", root, draw.normal(size=(4000, rounds, 100)))
    products = np.zeros((4000, rounds, 2, 2 * canaries))
    for entry in range(100):
        place = along.group[entry], along.block[entry]
        products[(..., *place)] += noise[..., entry] * along.entries[entry]
    none = np.zeros((4000, canaries))
    chances = np.broadcast_to([1.0, 0.0, 1.0, 1.0], (4000, canaries, rounds))
    games = Games(none, products, chances)
    known = learned(games, along, "zero_out")
    exact = np.linalg.inv(root @ root.T)
    # 20,000 samples: entries to 1 %, their inverse to a few.
    assert np.abs(known.precision - exact).max() < 0.05 * np.abs(exact).max()
    seen = draw.normal(size=(7, rounds))
    shift = np.array([1.0, 0.0, 1.0, 1.0])
    ratio = seen @ exact @ shift - shift @ exact @ shift / 2
    perfect = Attack(known.weights, exact, "zero_out")
    found = perfect.scores(seen, np.broadcast_to(shift, (7, rounds)))
    assert found == pytest.approx(ratio)

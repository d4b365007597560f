# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Epsilon against closed forms and a transcription of the sampling theorem."""

import math
from decimal import Decimal, getcontext
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from gaussian_mechanism import gaussian

from fedblend.theory import privacy
from fedblend.theory.privacy import (
    _renyi_epsilon,
    cohort_cost,
    distribution_epsilon,
)

DELTA = 1e-5
USUAL: dict[str, Any] = dict(noise=4.0, cohort=10, clients=100, rounds=100, delta=DELTA)


def changed(**change: Any) -> Any:
    """``cohort_cost`` of the usual run with some changes."""
    return cohort_cost(**(USUAL | change))


@pytest.mark.parametrize("noise", [0.8, 4.0, 30.0])
@pytest.mark.parametrize("rounds", [1, 50])
def test_with_everyone_in_every_round_it_is_the_gaussian_mechanisms(noise, rounds):
    run: dict[str, Any] = {"noise": noise, "rounds": rounds, "cohort": 100}
    for adjacency, moved in (("replace_one", 2), ("zero_out", 1)):
        expected = gaussian(moved * math.sqrt(rounds) / noise, DELTA)
        found = changed(**run, adjacency=adjacency).epsilon
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_number_that_is_known():
    """Epsilon 1 at delta 1e-5 takes noise 3.7306 of a query that moves by 1."""
    for adjacency, noise in (("zero_out", 3.730632), ("replace_one", 2 * 3.730632)):
        found = changed(noise=noise, rounds=1, cohort=100, adjacency=adjacency)
        assert found.epsilon == pytest.approx(1, abs=1e-6)


def sampled(noise, cohort, clients, rounds, delta):
    """Theorem 27 of Wang, Balle and Kasiviswanathan, in 60 digits.

    Where an update is replaced the Gaussian's Rényi divergence of order a is
    2 a / noise^2.
    """
    getcontext().prec = 60
    chance, orders = Decimal(cohort) / clients, (*range(2, 40), *range(40, 121, 8))
    cost = [2 * Decimal(order) / Decimal(noise) ** 2 for order in range(122)]
    powers = [((order - 1) * cost[order]).exp() for order in range(122)]

    def difference(j):
        signed = ((-1) ** i * math.comb(j, i) * powers[j - i] for i in range(j + 1))
        return sum(signed, Decimal())

    halves = {j: difference(j) for j in range(2, 122, 2)}
    second = min(4 * (cost[2].exp() - 1), 2 * cost[2].exp())
    terms = [chance**2 * second]
    for j in range(3, 121):
        middle = 4 * (halves[j // 2 * 2] * halves[(j + 1) // 2 * 2]).sqrt()
        terms.append(chance**j * min(middle, 2 * powers[j]))
    best = math.inf
    for order in orders:
        chosen = (math.comb(order, j) * terms[j - 2] for j in range(2, order + 1))
        total = 1 + sum(chosen, Decimal())
        divergence = rounds * float(total.ln()) / (order - 1)
        # From Rényi to (epsilon, delta): proposition 12 of Canonne et al. 2020.
        log = math.log(delta) + math.log(order)
        best = min(best, divergence + math.log1p(-1 / order) - log / (order - 1))
    return best


@pytest.mark.parametrize(
    ("noise", "cohort", "clients", "rounds"),
    [(4.0, 10, 100, 100), (8.0, 5, 1000, 1000), (3.0, 20, 200, 30)],
)
def test_sampling_without_replacement_is_the_theorems(noise, cohort, clients, rounds):
    """The library looks at more orders, some of them not whole: little below."""
    run = {"noise": noise, "cohort": cohort, "clients": clients, "rounds": rounds}
    found = _renyi_epsilon(noise / 2, cohort, clients, rounds, DELTA)
    by_hand = sampled(**run, delta=DELTA)
    assert 0.995 * by_hand <= found <= by_hand * (1 + 1e-9)
    assert changed(**run).epsilon < 0.6 * found
    assert found < gaussian(2 * math.sqrt(rounds) / noise, DELTA)


@pytest.mark.parametrize(("noise", "chance"), [(4.0, 0.1), (1.0, 0.5), (3.0, 0.99)])
def test_one_sampled_round_has_the_epsilon_of_the_theorem(noise, chance):
    """Balle, Barthe and Gaboardi: delta is q times the Gaussian's delta at e.

    Epsilon is log(1 + q (exp(e) - 1)).
    """
    inner = gaussian(2 / noise, DELTA / chance)
    expected = math.log1p(chance * math.expm1(inner))
    cohort = round(chance * 1000)
    found = distribution_epsilon(noise / 2, cohort, 1000, 1, DELTA)
    assert expected <= found <= expected + 2e-4


@pytest.mark.parametrize(
    ("noise", "cohort", "rounds"), [(4.0, 10, 100), (2.0, 50, 4), (8.0, 5, 1000)]
)
def test_composed_rounds_cost_at_least_what_two_datasets_show(noise, cohort, rounds):
    """All others send -C, one sends C or -C: a mixture of two Gaussians or one.

    This pair is dp-accounting's for Poisson sampling. The bound is for all pairs, in
    both directions at once, and a little above.
    """
    pair = from_gaussian_mechanism(noise / 2, sampling_prob=cohort / 100)
    least = pair.self_compose(rounds).get_epsilon_for_delta(DELTA)
    found = distribution_epsilon(noise / 2, cohort, 100, rounds, DELTA)
    assert least <= found <= 1.1 * least


def drawn_delta(noise, chance, rounds, other, epsilon):
    """The delta at an epsilon of two datasets, by 100,000 draws: a bound from below.

    One client sends C or zeros, and the one in whose place it is drawn sends ``other``.
    """
    rng, total = np.random.default_rng(0), 0.0
    for _ in range(rounds):
        there = rng.random(100_000) < chance
        seen = np.where(there, 1.0, other) + noise * rng.standard_normal(100_000)
        lone, with_it, zeros = (
            np.exp(-((seen - at) ** 2) / 2 / noise**2) for at in (other, 1.0, 0.0)
        )
        rest = (1 - chance) * lone
        total += np.log((rest + chance * with_it) / (rest + chance * zeros))
    failures = np.maximum(0.0, -np.expm1(np.minimum(epsilon - total, 0.0)))
    return failures.mean() - 4 * failures.std() / np.sqrt(len(failures))


@pytest.mark.parametrize(
    ("noise", "cohort", "rounds"),
    [
        (4.0, 25, 12),
        pytest.param(4.0, 10, 100, marks=pytest.mark.slow),
        pytest.param(6.0, 5, 300, marks=pytest.mark.slow),
    ],
)
def test_a_client_that_sends_zeros_costs_what_two_datasets_show(noise, cohort, rounds):
    """Below the bound for replacing, above what is drawn; Poisson's is no bound."""
    run: dict[str, Any] = {"noise": noise, "cohort": cohort, "rounds": rounds}
    run |= {"delta": 1e-2, "clients": 100}
    kinds: list[dict[str, Any]] = [
        {},
        {"adjacency": "zero_out"},
        {"adjacency": "zero_out", "sampling": "poisson"},
    ]
    replaced, found, poisson = (
        cohort_cost(**run, **kind).epsilon or 0.0 for kind in kinds
    )
    assert found < 0.65 * replaced
    for other in (-1.0, 0.0):
        assert drawn_delta(noise, cohort / 100, rounds, other, found) <= 1e-2
    assert drawn_delta(noise, cohort / 100, rounds, -1.0, 0.7 * found) > 1e-2
    assert drawn_delta(noise, cohort / 100, rounds, -1.0, poisson) > 1e-2


def test_losses_too_large_for_the_distribution_leave_the_other_bounds():
    assert distribution_epsilon(0.025, 10, 100, 3, DELTA) == math.inf
    everyone = changed(noise=0.05, rounds=3, cohort=100).epsilon
    assert math.isfinite(everyone)
    assert changed(noise=0.05, rounds=3).epsilon <= everyone


def test_little_noise_and_large_cohorts_never_cost_more_than_everyone():
    everyone = gaussian(2 * math.sqrt(5), DELTA)
    found = changed(noise=1.0, cohort=99, rounds=5).epsilon
    assert 0.99 * everyone < found <= everyone * (1 + 1e-6)


@pytest.mark.parametrize(
    ("chance", "noise", "rounds", "known"),
    [
        (0.01, 1.1, 1000, 1.5154),
        (0.1, 1.0, 100, 7.0466),
        (0.5, 2.0, 50, 9.4736),
        (1.0, 5.0, 100, 9.9973),
    ],
)
def test_poisson_sampling_is_dp_accountings(chance, noise, rounds, known):
    """Its event by its accountant, and numbers that were noted once to four places.

    What is left of delta for the event, after cohorts without room, changes epsilon by
    less than a millionth.
    """
    run: dict[str, Any] = {"noise": noise, "rounds": rounds, "clients": 1000}
    run |= {"cohort": round(1000 * chance), "sampling": "poisson"}
    event = dp.PoissonSampledDpEvent(chance, dp.GaussianDpEvent(noise))
    accountant = PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    expected = accountant.compose(event, rounds).get_epsilon(DELTA)
    found = changed(**run, adjacency="add_or_remove").epsilon
    assert expected <= found <= expected * (1 + 1e-6)
    assert found == pytest.approx(known, abs=6e-5)


def test_poisson_sampling_with_everyone_is_the_gaussian_mechanisms():
    """The distribution of losses is rounded upwards, to steps of 1e-4."""
    run: dict[str, Any] = {"cohort": 100, "rounds": 9, "sampling": "poisson"}
    moves = {"replace_one": 2, "zero_out": 1, "add_or_remove": 1}
    for adjacency, moved in moves.items():
        exact = gaussian(moved * 3 / 4.0, DELTA)
        found = changed(**run, adjacency=adjacency).epsilon
        assert exact <= found <= exact + 1e-3


def test_cohorts_without_room_go_into_delta(monkeypatch):
    """Epsilon at delta is the event's at what is left of delta."""
    monkeypatch.setattr(privacy, "OVERFLOW", 1e-9)
    run: dict[str, Any] = {"sampling": "poisson", "adjacency": "add_or_remove"}
    found = changed(**run).epsilon
    left = DELTA - (1 + math.exp(found)) * 100e-9
    event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(4.0))
    accountant = PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    exact = accountant.compose(event, 100).get_epsilon(left)
    assert exact <= found <= exact * (1 + 1e-8)
    monkeypatch.setattr(privacy, "OVERFLOW", 1e-6)
    none = changed(**run)
    assert none.epsilon is None
    assert none.reason.startswith("delta 1e-05 is below the chance of a cohort that")


def test_it_grows_and_falls_where_it_should():
    usual = changed().epsilon
    for change in ({"noise": 3.0}, {"cohort": 20}, {"rounds": 200}, {"delta": 1e-7}):
        assert changed(**change).epsilon > usual * 1.05, change
    assert changed(rounds=0).epsilon == 0


def test_without_noise_there_is_no_guarantee():
    none = changed(noise=0.0)
    assert none.epsilon is None
    assert str(none) == "no guarantee: there is no noise"
    assert str(cohort_cost(**USUAL)).startswith(
        "epsilon 2.541 at delta 1e-05 (replace one)"
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"noise": -1.0}, "cohort_cost: noise: -1.0 is not a number"),
        ({"noise": np.inf}, "cohort_cost: noise: inf is not"),
        ({"delta": 0.0}, r"cohort_cost: delta: 0.0 is not in \(0, 1\)"),
        ({"delta": 1.0}, r"cohort_cost: delta: 1.0 is not in \(0, 1\)"),
        ({"cohort": 101}, "cohort: 101 is not between 1 and the 100 clients"),
        ({"rounds": -1}, "cohort_cost: rounds: -1 is not a whole number"),
        ({"adjacency": "add_or_remove"}, "adjacency: .* needs cohorts of random size"),
        ({"adjacency": "none"}, "adjacency: 'none' is not 'replace_one'"),
        ({"sampling": "none"}, "sampling: 'none' is not 'fixed' or 'poisson'"),
    ],
)
def test_what_makes_no_sense_is_refused(change, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        changed(**change)


def test_what_has_to_be_installed_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'fedblend\[private\]'"):
        cohort_cost(**USUAL)

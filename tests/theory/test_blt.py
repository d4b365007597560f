# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""BLT strategies against plain matrices: inverse, error, sensitivity by brute force."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from gaussian_mechanism import gaussian

from fedblend.theory.blt import (
    INDEPENDENT,
    Blt,
    coefficients,
    error_variances,
    inverse,
    optimal,
    sensitivity,
)
from fedblend.theory.privacy import blt_cost

SOME = Blt((0.3, 0.9), (0.25, 0.4))
STRATEGIES = {
    "independent": INDEPENDENT,
    "one": Blt((0.75,), (0.59,)),
    "two": SOME,
    "same decay twice": Blt((0.5, 0.5), (0.2, 0.3)),
    "no decay at once": Blt((0.0,), (1.0,)),
}


def matrix(strategy: Blt, rounds: int) -> np.ndarray:
    """C entry by entry, from the definition of its coefficients."""
    found = np.eye(rounds)
    for row in range(rounds):
        for column in range(row):
            pairs = zip(strategy.decays, strategy.weights, strict=True)
            away = row - column - 1
            found[row, column] = sum(weight * decay**away for decay, weight in pairs)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_coefficients_inverse_and_errors_are_those_of_the_matrix(name):
    strategy, rounds, momentum = STRATEGIES[name], 9, 0.6
    full = matrix(strategy, rounds)
    # Sums of nine products of numbers below one: float64 rounds far below 1e-12.
    near: Any = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(coefficients(strategy, rounds), full[:, 0], **near)
    undone = np.linalg.inv(full)
    np.testing.assert_allclose(inverse(strategy, rounds), undone[:, 0], **near)
    for beta in (0.0, momentum):
        sums = np.tril(np.ones((rounds, rounds)))
        velocity = np.array(
            [
                [beta ** (i - j) if j <= i else 0.0 for j in range(rounds)]
                for i in range(rounds)
            ]
        )
        noise = sums @ velocity @ undone
        np.testing.assert_allclose(
            error_variances(strategy, rounds, beta), (noise**2).sum(axis=1), rtol=1e-12
        )


def patterns(rounds: int, separation: int, most: int):
    """All sets of rounds in which a client can take part."""
    for count in range(1, most + 1):
        for chosen in combinations(range(rounds), count):
            if all(np.diff(chosen) >= separation):
                yield list(chosen)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("rounds", "separation", "participations"),
    [(10, 1, None), (10, 3, None), (11, 4, 2), (9, 1, 3), (8, 8, None), (7, 2, 1)],
)
def test_sensitivity_is_the_largest_of_all_patterns(
    name, rounds, separation, participations
):
    """A client sends vectors of norm one; those that all agree are the worst.

    G has no negative entry, so that a sum over pairs is largest where all inner
    products are one. Random vectors show that none is worse.
    """
    full, rng = matrix(STRATEGIES[name], rounds), np.random.default_rng(0)
    most, largest = participations or rounds, 0.0
    for chosen in patterns(rounds, separation, most):
        largest = max(largest, np.linalg.norm(full[:, chosen].sum(axis=1)))
        sent = rng.normal(size=(len(chosen), 3))
        sent /= np.linalg.norm(sent, axis=1, keepdims=True)
        agreeing = np.linalg.norm(full[:, chosen].sum(axis=1))
        assert np.linalg.norm(full[:, chosen] @ sent) <= agreeing + 1e-12
    found = sensitivity(STRATEGIES[name], rounds, separation, participations)
    assert found == pytest.approx(largest, rel=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_that_begins_anew_moves_no_further(name):
    """After a resume: pieces of C on the diagonal, whatever the pattern and the cut."""
    rounds, separation = 9, 2
    full = matrix(STRATEGIES[name], rounds)
    for cut in range(1, rounds):
        pieces = full.copy()
        pieces[cut:, :cut] = 0
        again = matrix(STRATEGIES[name], rounds - cut)
        np.testing.assert_array_equal(pieces[cut:, cut:], again)
        for chosen in patterns(rounds, separation, rounds):
            moved = np.linalg.norm(pieces[:, chosen].sum(axis=1))
            assert moved <= np.linalg.norm(full[:, chosen].sum(axis=1)) + 1e-12


def lower_bound(rounds: int) -> float:
    """No factorization of the prefix sums has a smaller mean or largest error.

    |A|_* <= |B|_F |C|_F, and |C|_F^2 is at most the rounds times the squared
    sensitivity of clients that take part once.
    """
    values = np.linalg.svd(np.tril(np.ones((rounds, rounds))), compute_uv=False)
    return (values.sum() / rounds) ** 2


def cost(strategy: Blt, rounds: int, separation: int, momentum: float = 0.0) -> float:
    """The mean error at equal privacy."""
    moved = sensitivity(strategy, rounds, separation)
    return moved**2 * error_variances(strategy, rounds, momentum).mean()


@pytest.mark.parametrize(("rounds", "above"), [(32, 1.16), (128, 1.14), (512, 1.12)])
def test_the_optimum_is_near_the_lower_bound_and_far_below_the_tree(rounds, above):
    """The square root of A, optimal among Toeplitz for the largest error, is no better.

    ``above`` is what was found, to the next percent; errors of a tree are four to six
    times the bound.
    """
    bound = lower_bound(rounds)
    found = cost(optimal(rounds=rounds, separation=rounds), rounds, rounds)
    assert bound <= found <= above * bound
    root = np.cumprod([1.0, *(1 - 0.5 / np.arange(1, rounds))])
    errors = np.cumsum(root**2).mean() * (root**2).sum()
    assert found < errors
    nodes = np.mean([number.bit_count() for number in range(1, rounds + 1)])
    assert 3.5 * found < rounds.bit_length() * nodes


@pytest.mark.parametrize(
    ("rounds", "separation", "momentum"), [(32, 8, 0.0), (60, 60, 0.9), (64, 4, 0.5)]
)
def test_the_optimum_beats_other_strategies(rounds, separation, momentum):
    found = optimal(rounds=rounds, separation=separation, momentum=momentum)
    best = cost(found, rounds, separation, momentum)
    rng = np.random.default_rng(1)
    for _ in range(300):
        weights = rng.dirichlet(np.ones(4))[:3]
        other = Blt(tuple(rng.uniform(0, 1, 3)), tuple(weights))
        assert best <= cost(other, rounds, separation, momentum)
    assert best < 0.8 * cost(INDEPENDENT, rounds, separation, momentum)


def test_clients_in_every_round_leave_nothing_to_correlate():
    assert optimal(rounds=64) == optimal(rounds=1, separation=1) == INDEPENDENT
    assert optimal(rounds=64, separation=8, buffers=0) == INDEPENDENT


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_epsilon_is_that_of_the_gaussian_mechanism(adjacency):
    """As of ``C x + z``: the largest move over the noise."""
    moves = {"replace_one": 2, "zero_out": 1}[adjacency]
    full = matrix(SOME, 10)
    every = patterns(10, 3, 10)
    worst = float(max(np.linalg.norm(full[:, one].sum(axis=1)) for one in every))
    run: dict[str, Any] = {"strategy": SOME, "rounds": 10, "separation": 3}
    run |= {"noise": 5.0, "delta": 1e-5, "adjacency": adjacency}
    expected = gaussian(moves * worst / 5.0, 1e-5)
    assert blt_cost(**run).epsilon == pytest.approx(expected, rel=1e-6)
    twice = gaussian(moves * worst * np.sqrt(2) / 5.0, 1e-5)
    assert blt_cost(**run, runs=2).epsilon == pytest.approx(twice, rel=1e-6)


def test_without_buffers_it_is_rounds_with_noise_of_their_own():
    run: dict[str, Any] = {"noise": 4.0, "rounds": 31, "delta": 1e-5}
    blt = blt_cost(strategy=INDEPENDENT, separation=5, **run)
    alone = gaussian(2 * np.sqrt(7) / 4.0, 1e-5)
    assert blt.epsilon == pytest.approx(alone, rel=1e-6)


def test_clients_that_are_closer_than_planned_cost_more_and_are_accounted_for():
    strategy = optimal(rounds=32, separation=8)
    run: dict[str, Any] = {"noise": 8.0, "strategy": strategy, "rounds": 32}
    planned = blt_cost(**run, delta=1e-4, separation=8).epsilon or 0
    dealt = blt_cost(**run, delta=1e-4, participations=4).epsilon or 0
    drawn = blt_cost(**run, delta=1e-4).epsilon or 0
    assert 1.3 * planned < dealt
    assert 3 * dealt < drawn
    none = blt_cost(**{**run, "noise": 0.0}, delta=1e-4)
    assert str(none) == "no guarantee: there is no noise"
    assert blt_cost(**{**run, "rounds": 0}, delta=1e-4).epsilon == 0


@pytest.mark.parametrize(
    "wrong",
    [
        Blt((1.0,), (0.5,)),
        Blt((-0.1,), (0.5,)),
        Blt((0.5,), (-0.1,)),
        Blt((0.5, 0.6), (0.7, 0.4)),
        Blt((0.5,), ()),
        Blt((float("nan"),), (0.5,)),
        Blt((0.5,), (float("nan"),)),
        (0.5, 0.5),
    ],
)
def test_strategies_for_which_the_sensitivity_does_not_hold_are_refused(wrong):
    with pytest.raises(
        ValueError, match=r"^sensitivity: strategy: .* is not a Blt wit"
    ):
        sensitivity(wrong, 10)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rounds": 0}, "optimal: rounds: 0 is not a whole number of at least 1"),
        ({"separation": 0}, "optimal: separation: 0 is not a whole number"),
        ({"buffers": 11}, r"optimal: buffers: 11 is not a whole number in \[0, 10\]"),
        ({"momentum": 1.0}, r"optimal: momentum: 1.0 is not in \[0, 1\)"),
        ({"participations": 0}, "optimal: participations: 0 is not a whole number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(change, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        optimal(**{"rounds": 8, **change})

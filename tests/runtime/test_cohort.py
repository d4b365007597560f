# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Cohorts: without replacement, fair, and a matter of seed and round alone."""

import jax
import numpy as np
import pytest

from fedblend.runtime.cohort import cohorts

ROOT = jax.random.key(3)


@pytest.mark.parametrize(("clients", "size"), [(10, 1), (10, 9), (7, 3), (10**6, 50)])
def test_members_are_distinct_sorted_and_in_range(clients, size):
    drawn = cohorts(ROOT, range(20), clients, size)
    assert drawn.shape == (20, size)
    assert (np.diff(drawn, axis=1) > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < clients


def test_a_cohort_of_all_is_everybody():
    assert np.array_equal(cohorts(ROOT, [4, 5], 6, 6), [range(6), range(6)])


def test_a_rounds_cohort_does_not_depend_on_the_block_it_stands_in():
    whole = cohorts(ROOT, range(12), 30, 5)
    pieces = [cohorts(ROOT, r, 30, 5) for r in (range(5), range(5, 6), range(6, 12))]
    assert np.array_equal(whole, np.concatenate(pieces))
    assert np.array_equal(cohorts(ROOT, [11, 3], 30, 5), whole[[11, 3]])


def test_rounds_and_seeds_draw_different_cohorts():
    drawn = cohorts(ROOT, range(50), 1000, 10)
    assert len({tuple(row) for row in drawn.tolist()}) == 50
    other = cohorts(jax.random.key(4), range(50), 1000, 10)
    assert not (drawn == other).all(axis=1).any()


def chi_square(observed: np.ndarray, expected: float) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_every_client_is_equally_likely():
    """4000 draws of 3 from 11. Counts without replacement vary less than
    independent ones, so the 99.9 % point of chi-square(10), 29.6, is generous."""
    drawn = cohorts(ROOT, range(4000), 11, 3)
    counts = np.bincount(drawn.ravel(), minlength=11)
    assert chi_square(counts, 4000 * 3 / 11) < 29.6


def test_every_set_is_equally_likely():
    """All 10 pairs of 5 clients; 27.9 is the 99.9 % point of chi-square(9)."""
    drawn = cohorts(ROOT, range(4000), 5, 2)
    counts = np.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25)
    pairs = counts[counts > 0]
    assert len(pairs) == 10
    assert chi_square(pairs, 400) < 27.9


def test_the_fairness_check_can_fail():
    """Forgetting Floyd's replacement by the newest would favour low numbers."""
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.integers(0, [9, 10, 11]) for _ in range(4000)])
    counts = np.bincount(drawn.ravel(), minlength=11)
    assert chi_square(counts, 4000 * 3 / 11) > 29.6

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who masks with whom: thresholds by exact tails, and circles that are circles."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from fedblend_federation.secure import session as graphs
from fedblend_federation.secure.session import (
    degree_and_threshold,
    graph_of,
    least_of,
    left_out,
)


@pytest.mark.parametrize("nodes", [3, 4, 8, 40, 50])
def test_small_cohorts_are_complete(nodes):
    assert degree_and_threshold(nodes) == (nodes - 1, -(-2 * nodes // 3))
    found = graph_of(range(nodes), b"")
    assert all(holders == tuple(range(nodes)) for holders in found.holders.values())


@pytest.mark.parametrize("nodes", [51, 100, 200])
def test_large_cohorts_are_as_safe_as_stated(nodes):
    degree, threshold = degree_and_threshold(nodes)
    colluding, left = nodes // 10, nodes - nodes // 3

    def tail(marked: int, least: int) -> Fraction:
        ways = [
            comb(marked, n) * comb(nodes - 1 - marked, degree - n)
            for n in range(least, degree + 1)
            if n <= marked
        ]
        return Fraction(sum(ways), comb(nodes - 1, degree))

    assert degree < nodes - 1 and degree % 2 == 0
    assert nodes * tail(colluding, 2 * threshold - degree - 1) <= 2**-40
    assert nodes * tail(colluding, 2 * (threshold - 1) - degree - 1) > 2**-40
    assert nodes * (1 - tail(left - 1, threshold - 1)) <= 2**-20


def test_neighbors_are_mutual_and_as_many_for_all():
    found = graph_of(range(0, 240, 2), b"seed")
    degree, _ = degree_and_threshold(120)
    for node, holders in found.holders.items():
        assert len(holders) == len(set(holders)) == degree + 1
        assert all(node in found.holders[other] for other in holders)
    assert graph_of(range(0, 240, 2), b"other").holders != found.holders


def test_the_tail_is_that_of_draws():
    """Half a million draws: 5 standard deviations of their frequency."""
    rng = np.random.default_rng(0)
    draws = rng.hypergeometric(20, 80, 30, 500_000)
    expected = graphs._tail(100, 20, 30, 8)
    spread = np.sqrt(expected * (1 - expected) / 500_000)
    assert abs((draws >= 8).mean() - expected) < 5 * spread


def test_who_is_in_most_complaints_is_left_out():
    """Of a client whose box does not open and the holder who says so, one is guilty."""
    graph, all = graph_of(range(6), b""), range(6)
    everybody = {(5, holder) for holder in range(5)}
    assert left_out(graph, all, everybody) == [5]
    assert left_out(graph, all, everybody | {(0, 4)}) == [5]
    # Two shares less of five leave enough, and one liar takes one of everybody.
    assert left_out(graph, all, {(5, 0), (5, 1)}) == []
    assert left_out(graph, all, {(owner, 5) for owner in range(5)}) == []
    there = [1, 2, 4, 5]
    assert left_out(graph, there, {(owner, 5) for owner in range(5)}) == [5]
    two = everybody | {(4, holder) for holder in (0, 1, 2, 3)}
    assert left_out(graph, all, two) == [4, 5]


def test_two_thirds():
    assert [least_of(n) for n in (1, 2, 3, 4, 5, 6, 8)] == [1, 2, 2, 3, 4, 4, 6]

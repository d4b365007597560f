# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What trees cost: nodes counted by brute force, and dp-accounting's own event."""

from itertools import product
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from fedblend.theory.privacy import gaussian_epsilon
from fedblend_reproductions.dp_ftrl import tree_cost

DELTA = 1e-5
TREES: dict[str, Any] = dict(noise=4.0, tree=8, epoch=8, rounds=32, delta=DELTA)


def by_tree(**change: Any) -> Any:
    """``tree_cost`` of the usual trees with some changes."""
    return tree_cost(**(TREES | change))


def used(steps: int) -> set[tuple[int, int]]:
    """All nodes, as first and last leaf, that are in some noisy sum of a tree.

    A sum is covered by the largest aligned pieces that fit, one after another.
    """
    nodes = set()
    for leaves in range(1, steps + 1):
        first = 1
        while first <= leaves:
            size = max(
                2**level
                for level in range(20)
                if (first - 1) % 2**level == 0 and first + 2**level - 1 <= leaves
            )
            nodes.add((first, first + size - 1))
            first += size
    return nodes


def most_nodes(rounds: int, epoch: int, tree: int) -> int:
    """By trying every round of every epoch in which a client could take part."""
    total = 0
    for begun in range(0, rounds, epoch):
        there = []
        for first in range(begun, min(begun + epoch, rounds), tree):
            steps = min(tree, rounds - first, begun + epoch - first)
            nodes = used(steps)
            there += [
                sum(low <= leaf <= high for low, high in nodes)
                for leaf in range(1, steps + 1)
            ]
        total += max(there)
    return total


@pytest.mark.parametrize(
    ("rounds", "epoch", "tree"),
    [
        (1, 1, 1),
        (11, 3, 3),
        (32, 8, 8),
        (37, 12, 4),
        (21, 7, 7),
        (10, 16, 16),
        (50, 10, 1),
        (25, 16, 4),
        (26, 16, 8),
        (9, 8, 8),
        (7, 1, 1),
    ],
)
def test_a_tree_costs_as_much_as_the_nodes_a_client_can_be_in(rounds, epoch, tree):
    nodes = most_nodes(rounds, epoch, tree)
    run: dict[str, Any] = {"rounds": rounds, "epoch": epoch, "tree": tree}
    for adjacency, moved in (("replace_one", 2), ("zero_out", 1)):
        expected = gaussian_epsilon(nodes * (moved / 4.0) ** 2, DELTA)
        found = by_tree(**run, adjacency=adjacency).epsilon
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tree", [1, 2, 5, 8, 9])
def test_a_tree_that_begins_anew_wherever_costs_no_more_nodes(tree):
    """After a resume the rest of a tree is a tree of its own.

    Who took part before is in no sum of the rest, and takes part once in the whole.
    """
    for cuts in product([False, True], repeat=tree - 1):
        ends = [place for place, cut in enumerate(cuts, start=1) if cut]
        sizes = np.diff([0, *ends, tree]).tolist()
        assert max(most_nodes(size, size, size) for size in sizes) <= tree.bit_length()


@pytest.mark.parametrize("tree", [1, 2, 3, 7, 8, 100, 128])
def test_the_event_of_dp_accounting_has_as_many_nodes(tree):
    """Its Rényi bound is that of so many Gaussians, and a little above the exact one.

    The event is about a client that sends zeros: ``REPLACE_SPECIAL``.
    """
    noise, epochs = 6.0, 3
    event = dp.SingleEpochTreeAggregationDpEvent(noise, tree)
    nodes = most_nodes(tree, tree, tree)
    trees, gaussians = (
        RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
        .compose(one, epochs * times)
        .get_epsilon(DELTA)
        for one, times in ((event, 1), (dp.GaussianDpEvent(noise), nodes))
    )
    assert trees == pytest.approx(gaussians, rel=1e-6)
    run: dict[str, Any] = {
        "noise": noise,
        "tree": tree,
        "epoch": tree,
        "rounds": epochs * tree,
    }
    found = by_tree(**run, adjacency="zero_out").epsilon
    assert 0.9 * trees < found < trees


def test_trees_of_one_round_are_rounds_with_noise_of_their_own():
    always = gaussian_epsilon(7 * (2 / 4.0) ** 2, DELTA)
    for epoch, rounds in ((1, 7), (5, 31)):
        assert by_tree(tree=1, epoch=epoch, rounds=rounds).epsilon == pytest.approx(
            always
        )


def test_several_runs_are_as_many_trees():
    twice = by_tree(rounds=64).epsilon
    assert by_tree(runs=2).epsilon == twice
    assert twice > 1.2 * by_tree().epsilon
    assert by_tree(rounds=0).epsilon == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"noise": 0.0}, "there is no noise"),
        (
            {"epoch": None},
            "clients are drawn in every round, and one may take part more",
        ),
        (
            {"epoch": 12},
            "clients are drawn in epochs of 12 rounds, and one may take pa",
        ),
        ({"epoch": 4}, "clients are drawn in epochs of 4 rounds, and one may take par"),
    ],
)
def test_a_tree_in_which_a_client_may_be_twice_has_no_guarantee(change, reason):
    none = by_tree(**change)
    assert none.epsilon is None
    assert str(none).startswith(f"no guarantee: {reason}")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tree": 0}, "tree: 0 is not a whole number"),
        ({"epoch": 0}, "epoch: 0 is not a whole number"),
        ({"runs": 0}, "runs: 0 is not a whole number"),
        ({"noise": -1.0}, "noise: -1.0 is not a number of"),
        ({"adjacency": "none"}, "adjacency: 'none' is not 'replace_one'"),
    ],
)
def test_trees_that_make_no_sense_are_refused(change, line):
    with pytest.raises(ValueError, match=line):
        by_tree(**change)

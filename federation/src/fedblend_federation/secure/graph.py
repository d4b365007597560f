# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who masks with whom: everybody with everybody, or, in large cohorts, with some.

A node's holders are its neighbors and itself; ``threshold`` of them recover what the
node leaves behind. In a complete graph of n nodes the threshold is ceil(2n/3).

In a large cohort the nodes stand in a circle, in an order drawn from the attempt, and a
node's neighbors are the k nearest. k and the threshold t are the smallest for which all
of this holds for every node, up to small probabilities, by tails of the hypergeometric
distribution: with x of its k + 1 holders colluding with the server, 2t > k + 1 + x, so
that honest holders who are told different things do not make up two thresholds; and at
least t holders are left when a third of all nodes are gone.

Reference: Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure single-server aggregation
with (poly)logarithmic overhead", CCS 2020. Where this differs from the paper: the first
condition, which is for a server that lies.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

COMPLETE = 50
"""Nodes up to which everybody masks with everybody."""
COLLUDING, GONE = 10, 3
"""One in so many nodes may collude with the server in a large cohort, or be gone."""
UNSAFE, LOST = 2.0**-40, 2.0**-20
"""Probabilities that a graph is not safe, or that a round cannot be opened."""


class Graph(NamedTuple):
    """The holders of every node, in order, the node itself among them."""

    holders: dict[int, tuple[int, ...]]
    threshold: int

    def neighbors(self, node: int, among: Iterable[int]) -> list[int]:
        """The neighbors of a node that are among these nodes, in order."""
        some = set(among) - {node}
        return [other for other in self.holders[node] if other in some]


def least_of(nodes: int) -> int:
    """Two thirds of so many nodes, without which nothing is opened."""
    return -(-2 * nodes // 3)


def most_colluding(nodes: int) -> int:
    """Of so many nodes, how many may collude with a server that lies and gain nothing.

    In a complete graph c nodes that have any view make two thresholds t together with
    n - c honest ones if 2 (t - c) <= n - c, that is c >= 2 t - n, which is n / 3 or
    more: 3 c + 1 nodes are enough.
    """
    return (nodes - 1) // 3 if nodes <= COMPLETE else nodes // COLLUDING


def graph_of(members: Sequence[int], seed: bytes) -> Graph:
    """The graph of a cohort; ``seed`` puts large ones in their order."""
    degree, threshold = degree_and_threshold(len(members))
    everybody = tuple(sorted(members))
    if degree == len(members) - 1:
        return Graph(dict.fromkeys(everybody, everybody), threshold)

    def place(node: int) -> bytes:
        return hashlib.sha256(seed + str(node).encode()).digest()

    circle, half = sorted(everybody, key=place), degree // 2
    holders = {
        node: tuple(
            sorted(circle[(at + step) % len(circle)] for step in range(-half, half + 1))
        )
        for at, node in enumerate(circle)
    }
    return Graph(holders, threshold)


def left_out(
    graph: Graph, answered: Collection[int], complaints: Collection[tuple[int, int]]
) -> list[int]:
    """Whom a sum must do without, so that enough holders can open all boxes.

    Of a client and a holder for whom its box does not open, either may have spoiled
    it. Who is in most such pairs is left out first. A few who lie about many others
    are therefore left out themselves, or nobody is.

    Args:
        graph: of the attempt.
        answered: who is there to open the sum.
        complaints: such pairs.
    """
    rest, found = set(complaints), []

    def short(client: int) -> bool:
        there = [one for one in graph.holders[client] if one in answered]
        good = [holder for holder in there if (client, holder) not in rest]
        return len(good) < graph.threshold

    while any(short(owner) for owner, _ in rest):
        counted = Counter(one for pair in sorted(rest) for one in pair)
        found.append(counted.most_common(1)[0][0])
        rest = {pair for pair in rest if found[-1] not in pair}
    return found


@lru_cache(maxsize=64)
def degree_and_threshold(nodes: int) -> tuple[int, int]:
    """The number of neighbors of a node, and the threshold."""
    complete = nodes - 1, least_of(nodes)
    if nodes <= COMPLETE:
        return complete
    colluding, left = most_colluding(nodes), nodes - nodes // GONE
    others, threshold = nodes - 1, 2
    for degree in range(2, others, 2):
        # A threshold that was too small for fewer holders is too small for more.
        while _at_least(others, colluding, degree, 2 * threshold - degree - 1) > (
            UNSAFE / nodes
        ):
            threshold += 1
        # The node itself is one of its holders that are left.
        enough = _at_least(others, left - 1, degree, threshold - 1)
        if threshold <= degree and 1 - enough <= LOST / nodes:
            return degree, threshold
    return complete


def _at_least(all: int, marked: int, drawn: int, least: int) -> float:
    """The probability that so many of some that are drawn are marked, or more."""
    if least <= 0:
        return 1.0
    ways = sum(
        comb(marked, n) * comb(all - marked, drawn - n)
        for n in range(least, min(marked, drawn) + 1)
    )
    return ways / comb(all, drawn)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""k-means, for some thousands of clients with short signatures: plain NumPy."""

from typing import NamedTuple

import jax
import numpy as np

from fedblend import keys
from fedblend.checks import COUNT, gate
from fedblend.core import Key


class Groups(NamedTuple):
    """Which group each client is in, counted in the order of their first members.

    ``inertia`` is the sum of squared distances to the groups' means.
    """

    assignment: np.ndarray
    inertia: float


@gate(k=COUNT, restarts=COUNT, steps=COUNT)
def kmeans(
    points: np.ndarray, k: int, key: Key, *, restarts: int = 10, steps: int = 100
) -> Groups:
    """k-means: the best of several runs of Lloyd's algorithm from k-means++ starts.

    No group is empty: one that would be takes the client farthest from its center.

    Args:
        points: one row for every client, the ``values`` of signatures.
        k: how many groups.
        key: of the starts.
        restarts: runs, of which the one with the least inertia is kept.
        steps: of a run at most; it stops when nobody changes group.

    Reference: Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding",
    SODA 2007.
    """
    points = np.asarray(points, np.float64)
    if not 1 <= k <= len(points):
        raise ValueError(f"k: {k} is not between 1 and the {len(points)} clients")
    words = np.asarray(jax.random.key_data(keys.named(key, "k-means")))
    tries = (
        _lloyd(points, _far_apart(points, k, np.random.default_rng([*words, i])), steps)
        for i in range(restarts)
    )
    best = min(tries, key=lambda groups: groups.inertia)
    _, firsts = np.unique(best.assignment, return_index=True)
    ranks = np.argsort(np.argsort(firsts))
    return best._replace(assignment=ranks[best.assignment])


def _squared_distances(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    return np.square(points[:, None] - centers[None]).sum(axis=2)


def _far_apart(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Starts of k-means++: drawn by the squared distance to those before.

    Of a few such draws the one that leaves the least distance is taken.
    """
    chosen = [int(rng.integers(len(points)))]
    away = _squared_distances(points, points[chosen])[:, 0]
    while len(chosen) < k:
        chance = away / away.sum() if away.sum() > 0 else None
        drawn = rng.choice(len(points), 2 + int(np.log(k)), p=chance)
        left = np.minimum(away[:, None], _squared_distances(points, points[drawn]))
        best = left.sum(axis=0).argmin()
        chosen.append(int(drawn[best]))
        away = left[:, best]
    return points[chosen]


def _lloyd(points: np.ndarray, centers: np.ndarray, steps: int) -> Groups:
    """Everybody to the nearest center, centers to their means, until nobody moves."""
    k, before = len(centers), None
    for _ in range(steps):
        distances = _squared_distances(points, centers)
        assignment = distances.argmin(axis=1)
        nearest = distances.min(axis=1)
        for empty in np.flatnonzero(np.bincount(assignment, minlength=k) == 0):
            crowded = np.bincount(assignment, minlength=k)[assignment] > 1
            moved = np.where(crowded, nearest, -1).argmax()
            assignment[moved], nearest[moved] = empty, 0
        centers = np.stack([points[assignment == c].mean(axis=0) for c in range(k)])
        if before is not None and np.array_equal(assignment, before):
            break
        before = assignment
    return Groups(assignment, float(np.square(points - centers[assignment]).sum()))

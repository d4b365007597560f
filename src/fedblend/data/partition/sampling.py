# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How rows are dealt to clients: the arithmetic behind the partitioners.

A partition under construction is ``owner``, the client of each row (-1 for nobody).
"""

import numpy as np


def evenly(total: int, pieces: int) -> np.ndarray:
    """Lengths of ``pieces`` almost equal pieces, the longer ones first."""
    return total // pieces + (np.arange(pieces) < total % pieces)


def cut(order: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Pieces of these lengths, one after another."""
    return np.split(order.astype(np.int64), np.cumsum(counts)[:-1])


def by_owner(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of each client, in ascending order; rows of nobody have owner -1."""
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    return cut(order, np.bincount(owner[order], minlength=clients))


def choices(
    room: np.ndarray, clients: int, classes: int, rng: np.random.Generator
) -> np.ndarray:
    """Distinct classes for each client: all as often as each other, within ``room``.

    Class by class, the clients are dealt in turn: as no class is dealt more often than
    there are clients, nobody gets one twice.
    """
    order = rng.permutation(len(room))
    order = order[np.argsort(room[order], kind="stable")]
    uses = np.zeros(len(room), np.int64)
    left = clients * classes
    for done, code in enumerate(order):
        uses[code] = min(room[code], left // (len(room) - done))
        left -= uses[code]
    dealt = rng.permutation(len(room))
    stream = np.repeat(dealt, uses[dealt])
    return stream.reshape(classes, clients).T.copy()


def mixed(chosen: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Swap classes between random pairs of clients until their origin is forgotten."""
    clients, classes = chosen.shape
    half = clients // 2
    for _ in range(20 * classes if half else 0):
        order = rng.permutation(clients)
        left, right = order[:half], order[half : 2 * half]
        i, j = rng.integers(classes, size=(2, half))
        mine, yours = chosen[left, i], chosen[right, j]
        free = ~(chosen[left] == yours[:, None]).any(axis=1)
        free &= ~(chosen[right] == mine[:, None]).any(axis=1)
        chosen[left[free], i[free]] = yours[free]
        chosen[right[free], j[free]] = mine[free]
    return chosen


def share(
    codes: np.ndarray, chosen: np.ndarray, client: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The owner of each row when ``client[s]`` takes an equal share of a class."""
    owner = np.full(len(codes), -1, np.int64)
    for code in np.unique(chosen):
        takers = rng.permutation(client[chosen == code])
        mine = rng.permutation(np.flatnonzero(codes == code))
        owner[mine] = np.repeat(takers, evenly(len(mine), len(takers)))
    return owner


def topped_up(
    owner: np.ndarray, clients: int, minimum: int, rng: np.random.Generator
) -> np.ndarray:
    """Move random rows from the largest clients to those below the minimum.

    The same as moving one row at a time from whoever is largest: all givers come down
    to one level, which is found by bisection.
    """
    counts = np.bincount(owner, minlength=clients)
    lacking = np.maximum(minimum - counts, 0)
    if not lacking.any():
        return owner
    low, high = minimum, int(counts.max())
    while low < high:
        level = (low + high + 1) // 2
        enough = np.maximum(counts - level, 0).sum() >= lacking.sum()
        low, high = (level, high) if enough else (low, level - 1)
    giving = np.maximum(counts - low, 0)
    givers = np.flatnonzero(giving)
    giving[givers[: giving.sum() - lacking.sum()]] -= 1
    order = np.lexsort((rng.random(len(owner)), owner))
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    moved = rng.permutation(order[place < np.repeat(giving, counts)])
    owner = owner.copy()
    owner[moved] = np.repeat(np.arange(clients), lacking)
    return owner

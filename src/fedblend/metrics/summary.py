# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A metric over clients, in NumPy; clients with NaN are left out."""

from typing import NamedTuple

import numpy as np

from fedblend.checks import FLAG, gate
from fedblend.errors import UserError


class Spread(NamedTuple):
    """A metric over clients.

    ``weighted`` weighs clients by their rows, ``std`` is over clients,
    ``worst_tenth`` is the mean over the worst tenth of them (one at least), and
    ``clients`` is how many have a value at all.
    """

    mean: float
    weighted: float
    std: float
    worst_tenth: float
    worst: float
    best: float
    clients: int


@gate(higher_is_better=FLAG)
def over_clients(
    values: np.ndarray, counts: np.ndarray, higher_is_better: bool
) -> Spread:
    """Summarize one value for every client.

    >>> spread = over_clients(np.array([0.5, 1.0]), np.array([30, 10]), True)
    >>> spread.mean, spread.weighted, spread.worst
    (0.75, 0.625, 0.5)
    """
    values = np.asarray(values, np.float64)
    counts = np.asarray(counts, np.float64)
    if counts.shape != values.shape:
        allowed = f"one for each of the {len(values)} clients"
        raise UserError("counts", counts, allowed, f"an array of {len(counts)}")
    known = ~np.isnan(values)
    values, counts = values[known], counts[known]
    if not values.size:
        return Spread(*[float("nan")] * 6, clients=0)
    ordered = np.sort(values)[:: 1 if higher_is_better else -1]
    total = counts.sum()
    with np.errstate(invalid="ignore"):  # a diverged client's loss is infinite
        return Spread(
            mean=float(values.mean()),
            weighted=float(values @ counts / total) if total else float("nan"),
            std=float(values.std()),
            worst_tenth=float(ordered[: max(len(ordered) // 10, 1)].mean()),
            worst=float(ordered[0]),
            best=float(ordered[-1]),
            clients=len(ordered),
        )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Quadratics at clients and at the server, whose mixed minimizer is a linear solve.

Clients have 1, 2, 3 and 6 rows, which are their weights p_i, and f_f is the mean over
all rows. The server has one row of its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.transforms import central_loss
from fedblend.trees import precision

COUNTS = (1, 2, 3, 6)
WEIGHTS = (0.6, 0.4)
RATIO = WEIGHTS[1] / WEIGHTS[0]
DIM = 4
LOSS = fb.datasets.quadratic_loss
CENTRAL = central_loss.row_loss(LOSS)
FOLDS = 45.0
"""Runs are so long that the slowest error falls by about exp of this."""


class Problem(NamedTuple):
    """Each client's mean (A, b), the server's, and the rows that they are of."""

    federated_data: fb.FederatedData
    own: tuple[np.ndarray, np.ndarray]
    matrices: np.ndarray
    vectors: np.ndarray

    def optimum(self, shares: np.ndarray) -> np.ndarray:
        """Of w_f f_f + w_c f_c, where clients have these shares of f_f."""
        w_f, w_c = WEIGHTS
        matrix = w_f * np.tensordot(shares, self.matrices, 1) + w_c * self.own[0][0]
        return np.linalg.solve(
            matrix, w_f * shares @ self.vectors + w_c * self.own[1][0]
        )


def shares(numbers: Any) -> np.ndarray:
    """Numbers over their sum."""
    return np.array(numbers) / np.sum(numbers)


def problem(alike: bool) -> Problem:
    """Clients with the same row again and again, or with rows of their own."""
    draws, total = np.random.default_rng(0), sum(COUNTS)

    def some(number: int) -> tuple[np.ndarray, np.ndarray]:
        axes, _ = np.linalg.qr(draws.standard_normal((number, DIM, DIM)))
        matrices = (axes * np.linspace(1, 3, DIM)) @ axes.swapaxes(1, 2)
        return matrices, draws.standard_normal((number, DIM))

    own, rows = some(1), some(total)
    if alike:
        rows = tuple(np.repeat(part[:1], total, axis=0) for part in rows)
    parts = np.split(np.arange(total), np.cumsum(COUNTS)[:-1])
    means = [np.stack([part[i].mean(0) for i in parts]) for part in rows]
    return Problem(fb.federate(rows, parts), own, *means)


def simulated(
    of: Problem, build: Callable[[Any], fb.Algorithm], rates: Any, **options: Any
) -> fb.Run:
    """A run from ones with a replica for each rate, to be looked at in float64."""
    return fb.simulate(
        build,
        jnp.ones(DIM),
        of.federated_data,
        jax.random.key(0),
        central=fb.shard_of(of.own),
        over=jnp.asarray(rates, float),
        **options,
    )


def ends(
    of: Problem, build: Callable[[Any], fb.Algorithm], rates: Any, steps: int
) -> np.ndarray:
    """Where runs at these rates come to, long after they stand still."""
    rounds = int(FOLDS / (steps * np.min(rates)))
    with precision("float64"):
        run = simulated(of, build, rates, rounds=rounds, every=rounds)
        return np.asarray(run.complete().shared)

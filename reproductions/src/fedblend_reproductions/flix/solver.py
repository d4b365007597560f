# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Gradient descent, plain and compressed, on the problems of ``logistic``.

Through ``fb.simulate`` in float64, with all alphas and seeds as replicas of one run.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.core import Algorithm, start_with_params
from fedblend.trees import precision
from fedblend_reproductions.flix.logistic import Problem, descent, optimum, values

Item = TypeVar("Item")
Result = TypeVar("Result")


class Trace(NamedTuple):
    """What a solver did, at the end of some rounds.

    ``points`` is the shared model [alphas, seeds, records, dim], ``rounds`` and
    ``floats`` are of each record; floats are those that a client sent so far, the first
    message (``w_i x_i`` and ``w_i``, for x_avg) left out.
    """

    rounds: np.ndarray
    floats: np.ndarray
    points: np.ndarray


def solve(
    of: Problem,
    alphas: Sequence[float] | np.ndarray,
    steps: Sequence[float] | np.ndarray,
    *,
    rounds: int,
    every: int = 1,
    seeds: int = 1,
    wrap: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
    start: np.ndarray | None = None,
    average: str = "minimizer",
    until: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Gradient descent on FLIX's objective, all alphas and seeds side by side.

    Args:
        of: the clients.
        alphas: weights of the shared model; an entry may be an array over clients.
        steps: the step size for each alpha.
        rounds: of the solver.
        every: rounds between two records.
        seeds: how many.
        wrap: makes compressed descent of it.
        start: the first shared model; x_avg if None.
        average: how x_avg is weighted, see ``fb.flix``.
        until: end early, when the mean over seeds of ``f~ - min f~`` is so small for
            all alphas.
        seed: of the keys of all seeds.
    """

    def build(replica):
        algorithm = fb.flix(
            of.loss,
            descent(replica["step"]),
            alpha=replica["alpha"],
            local=fb.solvers.given(of.personal),
            smooth=of.smoothness.smooth,
            average=average,
        )
        if start is not None:
            algorithm = algorithm._replace(start=start_with_params)
        return wrap(algorithm)

    rounds_seen, bits, points = [], [], []
    with precision("float64"):
        run = fb.simulate(
            build,
            jnp.zeros(of.dim) if start is None else jnp.asarray(start),
            of.federated_data,
            jnp.tile(jax.random.split(jax.random.key(seed), seeds), len(alphas)),
            rounds=rounds,
            every=every,
            over={
                "alpha": jnp.repeat(jnp.asarray(alphas), seeds, axis=0),
                "step": jnp.repeat(jnp.asarray(steps), seeds),
            },
        )
        for record in run:
            rounds_seen.append(record[0].round)
            bits.append(record[0].bits_up)
            points.append(np.asarray(run.shared).reshape(len(alphas), seeds, of.dim))
            if until and gaps(of, alphas, points[-1]).mean(axis=1).max() <= until:
                break
    sent = np.array(bits, np.float64) - bits[0]
    floats = sent / (64 * of.clients)
    return Trace(np.array(rounds_seen), floats, np.stack(points, axis=2))


def gaps(of: Problem, alphas, points: np.ndarray) -> np.ndarray:
    """``f~ - min f~`` at points [alphas, ..., dim], a row for each alpha."""
    return np.stack(
        [
            values(of, alpha, those)
            - optimum(of, tuple(alpha) if np.ndim(alpha) else float(alpha)).value
            for alpha, those in zip(alphas, points, strict=True)
        ]
    )


def side_by_side(
    function: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """``function`` of every item, in threads: compiling one leaves cores for others."""
    with precision("float64"), ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(function, items))

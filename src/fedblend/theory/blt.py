# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Buffered linear Toeplitz strategies: how noise is correlated over rounds.

The server needs the sums of all updates so far, ``A x`` with A lower triangular and x_t
the sum of round t. A strategy is a lower triangular C; ``A x + A C^-1 z`` with
independent noise z is as private as ``C x + z``. Here C is a Toeplitz matrix whose
coefficients are a sum of d exponentials::

    c_0 = 1,   c_i = sum over j of weights_j decays_j^(i - 1)
    decays in [0, 1),   weights >= 0,   sum of the weights <= 1

so that C is nonnegative and its coefficients do not increase, and ``w = C^-1 z`` takes
d buffers s_j and no more, for any number of rounds::

    w <- z - sum over j of weights_j s_j,     s_j <- decays_j s_j + w

**Sensitivity.** A client takes part at most k times, at least b rounds apart, each time
with a vector of norm at most 1. With G = C^T C >= 0 it moves ``C x`` by at most the
square root of the sum of G over pairs of its rounds. As coefficients do not increase,
this is largest where it begins in the first round and returns every b rounds::

    sensitivity^2 = sum over i of (sum over j < k of c_(i - j b))^2

It holds also where updates depend on earlier noisy sums. A strategy that begins anew
in some round has the entries of C within each piece and zeros between pieces. Both are
nonnegative, so that beginning anew never has a larger sensitivity.

**Error.** Noise of standard deviation 1 in z leaves in the model of round t the
variance ``sum over i <= t of B_i^2``, where ``B = A C^-1`` is Toeplitz, too. With
v = sqrt(weights), ``diag(decays) - v v^T = U diag(l) U^T`` gives C^-1 in closed form:
coefficients 1 and ``- sum over j of (U^T v)_j^2 l_j^(i - 1)``. ``optimal`` minimizes
the mean of these variances over rounds, times the squared sensitivity.

Where this differs from the papers: the mean of the variances is minimized, by numerical
gradients over decays and weights themselves.

Reference: Dvijotham, McMahan, Pillutla, Steinke, Thakurta, "Efficient and near-optimal
noise generation for streaming differential privacy", FOCS 2024, arXiv:2404.16706;
McMahan, Xu, Zhang, "A hassle-free algorithm for strong differential privacy in
federated learning systems", EMNLP 2024, arXiv:2408.08868; for the sensitivity Kalinin,
Lampert, "Banded square root matrix factorization for differentially private model
training", NeurIPS 2024, arXiv:2405.13763; for adaptive updates Denisov, McMahan, Rush,
Smith, Thakurta, "Improved differential privacy for SGD via optimal private linear
operators on adaptive streams", NeurIPS 2022, arXiv:2202.08312.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from fedblend.checks import COUNT, PART, Number, gate, optional
from fedblend.errors import UserError

DIGITS = 3
"""Significant digits of an optimized strategy: more change its error by less than a
thousandth, and might differ between versions of the libraries that optimize."""
MOST_WEIGHT = 0.99
"""Of the buffers of an optimized strategy together."""
LEAST_WEIGHT = 1e-3
"""Of a buffer of an optimized strategy; others are left out."""


class Blt(NamedTuple):
    """A strategy C: the decay and the weight of each buffer; none is independent noise.

    The coefficients of C are 1 and ``sum_j weights_j decays_j^(i - 1)``.
    """

    decays: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()


INDEPENDENT = Blt()
"""The identity: every round has noise of its own."""


def check_strategy(key: str, value: Any) -> Blt:
    """A rule: a ``Blt`` whose coefficients are nonnegative and do not increase.

    The sensitivity holds for such strategies.
    """
    allowed = (
        "a Blt with a decay in [0, 1) and a weight of at least 0 for each buffer, "
        "weights of at most 1 together"
    )
    if not isinstance(value, Blt) or len(value.decays) != len(value.weights):
        raise UserError(key, value, allowed)
    decays, weights = np.asarray(value.decays, float), np.asarray(value.weights)
    inside = ((decays >= 0) & (decays < 1)).all() and (weights >= 0).all()
    if not inside or not weights.sum() <= 1:
        raise UserError(key, value, allowed)
    return value


STRATEGY = check_strategy
BUFFERS = Number(least=0, most=10, whole=True)


@gate(strategy=STRATEGY, rounds=COUNT)
def coefficients(strategy: Blt, rounds: int) -> np.ndarray:
    """The first column of C for so many rounds."""
    return np.append(1.0, _exponentials(strategy.decays, strategy.weights, rounds - 1))


@gate(strategy=STRATEGY, rounds=COUNT)
def inverse(strategy: Blt, rounds: int) -> np.ndarray:
    """The first column of C^-1, by which noise is correlated."""
    roots = np.sqrt(strategy.weights)
    decays, vectors = np.linalg.eigh(np.diag(strategy.decays) - np.outer(roots, roots))
    weights = -((vectors.T @ roots) ** 2)
    return np.append(1.0, _exponentials(decays, weights, rounds - 1))


def _exponentials(decays: Any, weights: Any, count: int) -> np.ndarray:
    powers = np.arange(count)[:, None]
    return np.power(np.asarray(decays, float), powers) @ np.asarray(weights, float)


@gate(strategy=STRATEGY, rounds=COUNT, separation=COUNT, participations=optional(COUNT))
def sensitivity(
    strategy: Blt,
    rounds: int,
    separation: int = 1,
    participations: int | None = None,
) -> float:
    """How far one client moves ``C x`` at most, if each of its updates moves x by 1.

    Args:
        strategy: C.
        rounds: of the whole run.
        separation: b, rounds from one update of a client to its next, at least.
        participations: k, updates of a client, at most; as many as fit if None.
    """
    fit = -(-rounds // separation)
    column = np.zeros(fit * separation)
    column[:rounds] = coefficients(strategy, rounds)
    moved = column.reshape(fit, separation).cumsum(axis=0)
    if participations is not None and participations < fit:
        moved[participations:] -= moved[:-participations].copy()
    return float(np.linalg.norm(moved.reshape(-1)[:rounds]))


@gate(strategy=STRATEGY, rounds=COUNT, momentum=PART)
def error_variances(strategy: Blt, rounds: int, momentum: float = 0.0) -> np.ndarray:
    """The variance of the noise in the model after each round, for z of variance 1.

    Args:
        strategy: C.
        rounds: of the whole run.
        momentum: of the server's steps, m in ``v <- m v + update``.
    """
    from scipy.signal import lfilter

    noise = np.cumsum(inverse(strategy, rounds))
    return np.cumsum(np.square(lfilter([1.0], [1.0, -momentum], noise)))


@gate(
    **dict.fromkeys(("rounds", "separation"), COUNT),
    participations=optional(COUNT),
    buffers=BUFFERS,
    momentum=PART,
)
@functools.lru_cache(maxsize=128)
def optimal(
    *,
    rounds: int,
    separation: int = 1,
    participations: int | None = None,
    buffers: int = 3,
    momentum: float = 0.0,
) -> Blt:
    """The strategy with the least mean error at equal privacy.

    It has fewer buffers than asked for where more do not help. It may be used for more
    or fewer rounds; ``sensitivity`` is for those that are run.

    Args:
        rounds: of the run that it is for.
        separation: b, rounds from one update of a client to its next, at least.
        participations: k, updates of a client, at most; as many as fit if None.
        buffers: d, at most; 0 is independent noise.
        momentum: of the server's steps.
    """
    from scipy.optimize import minimize

    if buffers == 0 or rounds == 1:
        return INDEPENDENT

    def cost(free: np.ndarray) -> float:
        strategy = _constrain(free)
        moved = sensitivity(strategy, rounds, separation, participations)
        error = error_variances(strategy, rounds, momentum).mean()
        return 2 * math.log(moved) + math.log(error)

    found = []
    for longest in {min(separation, rounds), rounds}:
        # Exponentials of these lengths are near c_i ~ i^(-1/2), optimal for one part.
        lengths = np.geomspace(1.0, 1.0 + longest, buffers)
        logits = np.log(np.expm1(1 / lengths))
        shares = lengths**-0.5
        start = np.concatenate([-logits, np.log(shares / shares.sum())])
        found.append(minimize(cost, start, method="L-BFGS-B"))
    best = _constrain(min(found, key=lambda one: one.fun).x)
    merged: dict[float, float] = {}
    for decay, weight in zip(best.decays, best.weights, strict=True):
        decay = 1 - _round(1 - decay)
        merged[decay] = merged.get(decay, 0.0) + weight
    kept = {d: _round(w) for d, w in sorted(merged.items()) if w > LEAST_WEIGHT}
    return Blt(tuple(kept), tuple(kept.values()))


def _constrain(free: np.ndarray) -> Blt:
    """Decays and weights within their bounds, of numbers that have none."""
    half = len(free) // 2
    bounded = np.clip(free, -30.0, 30.0)
    decays = 1 / (1 + np.exp(-bounded[:half]))
    shares = np.exp(bounded[half:])
    weights = MOST_WEIGHT * shares / (1 + shares.sum())
    return Blt(tuple(decays.tolist()), tuple(weights.tolist()))


def _round(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds of ``dp_fedavg`` without replacement by their privacy loss distribution.

``theory.privacy`` has the mechanism, and the bound for a client that is replaced.
For one that sends zeros, draw K - 1 of the other clients, and one more, j, of the rest:
the cohort is these K - 1 with the client, at chance q = K/n, or with j. Given both,
with v the update of j and u that of the client, a round is::

    A = (1 - q) N(v) + q N(u)   with the client     B = (1 - q) N(v) + q N(0)   without

around the same sum, so that, by advanced joint convexity (Balle, Barthe and Gaboardi),
with b = (1 + q (exp(e) - 1)) / exp(e) and H the delta at e::

    delta_round = q H(N(u), (1-b) N(v) + b N(0)) <= q ((1-b) d(e, 2C) + b d(e, C))
    delta_round = q H(N(0), (1-b) N(v) + b N(u)) <= q d(e, C)

of A against B, and of B against A: H is convex, and d(e, x) grows with the distance x.
By joint convexity the same holds if j and the K - 1 are not known. With v = 0 this
would be Poisson sampling; v = -u is worse, and the epsilon of Poisson sampling is no
bound here.
"""

import math

import numpy as np

LOSS_STEP, MAX_STEPS = 1e-4, 50_000
"""Privacy losses of a round are multiples of this step, or of a larger one if these are
too many."""
MAX_LOSS = 700.0
"""Of a round; its exponential is finite."""


def by_loss_distribution(
    noise: float,
    cohort: int,
    clients: int,
    rounds: int,
    delta: float,
    zeros: bool = False,
) -> float:
    """Epsilon of Gaussian rounds by their privacy loss distribution.

    Args:
        noise: in units of how far replacing one client moves the sum.
        cohort: clients of a round.
        clients: all there are.
        rounds: that are composed.
        delta: of all of them.
        zeros: whether the other client is one that sends zeros.
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    chance = cohort / clients
    # At larger losses a Gaussian has less than exp(-50), which counts as infinite loss.
    most = 0.5 / noise**2 + 10 / noise
    if most > MAX_LOSS:
        return math.inf
    top = math.log1p(chance * math.expm1(most))
    step = max(LOSS_STEP, top / MAX_STEPS)
    last = math.ceil(top / step)
    loss = step * np.arange(last + 1)
    inner = np.log1p(np.expm1(loss) / chance)
    there = gone = chance * _delta(noise, inner)
    if zeros:
        gone = chance * _delta(2 * noise, inner)
        share = np.exp(loss - inner)
        there = (1 - share) * there + share * gone

    def distribution(ahead: np.ndarray, back: np.ndarray) -> pld_pmf.PLDPmf:
        negative = -np.expm1(-loss[:0:-1]) + np.exp(-loss[:0:-1]) * back[:0:-1]
        deltas = _convex(step, np.concatenate([negative, ahead]))
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            step, -last, last, np.clip(deltas, 0.0, 1.0)
        )

    ways = [distribution(there, gone)]
    if zeros:
        ways.append(distribution(gone, there))
    composed = PrivacyLossDistribution(*ways).self_compose(rounds)
    return float(composed.get_epsilon_for_delta(delta))


def _delta(noise: float, loss: np.ndarray) -> np.ndarray:
    """The delta of a Gaussian mechanism, with noise in units of how far it moves."""
    from scipy.special import log_ndtr

    upper = log_ndtr(0.5 / noise - loss * noise)
    lower = loss + log_ndtr(-0.5 / noise - loss * noise)
    return -np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))


def _convex(step: float, deltas: np.ndarray) -> np.ndarray:
    """The deltas at losses around 0, made larger where they are not convex in exp(e).

    Those of all mechanisms are, and a bound of them need not be.
    """
    last = len(deltas) // 2
    gaps = np.diff(np.exp(step * np.arange(-last, last + 1)))
    slopes = np.minimum.accumulate((np.diff(deltas) / gaps)[::-1])
    falls = np.append(0.0, np.cumsum(-slopes * gaps[::-1]))
    return deltas[-1] + falls[::-1]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How sure a mean difference between two methods is, and Holm's correction.

The p-value of a mean inverts that interval: it is the level at which the interval just
reaches zero. So p < 0.05 where the 95 % interval excludes zero, and table and figure
never disagree. With one seed it is the paired t-test over clients. Clients are units
because a claim about a method is one about further clients; seeds add their own spread,
which a test over clients alone would not see. The signed-rank test asks for the median
and not for the mean that tables show, and sign flips of a few clients cannot reach 5 %
after a correction, however large the difference.

Many comparisons: Holm's step-down bounds the chance of a single false claim among all
of them at 5 %, whatever their dependence; runs that share clients are dependent.
"""

from collections.abc import Sequence

import numpy as np

LEVEL = 0.05
"""The chance of a false claim that is accepted, of all comparisons together."""
_LEAST = -700.0
"""The smallest logarithm of a p-value."""


def p_value(gaps: np.ndarray) -> float:
    """Of the mean of differences, [seeds, clients]; see the module's text.

    NaN for a single client, and where all differ by the very same amount: no spread, no
    test.

    >>> round(p_value(np.array([[1.0, 2.0, 3.0]])), 4)
    0.0742
    """
    from scipy.optimize import brentq
    from scipy.special import stdtr, stdtrit

    seeds, clients = gaps.shape
    if gaps.size and not gaps.any():
        return 1.0
    if clients < 2:
        return float("nan")
    mean = abs(float(gaps.mean()))
    sources = [(clients - 1, gaps.mean(axis=0).std(ddof=1) / np.sqrt(clients))]
    if seeds > 1:
        sources.append((seeds - 1, gaps.mean(axis=1).std(ddof=1) / np.sqrt(seeds)))
    # Rounding leaves a spread where there is none.
    sources = [(free, e) for free, e in sources if e > 1e-12 * mean]
    if not sources:
        return float("nan")
    if len(sources) == 1:
        freedom, error = sources[0]
        return float(2 * stdtr(freedom, -mean / error))

    def beyond(log: float) -> float:
        """How far the interval at a level reaches beyond zero."""
        tail = np.exp(log) / 2
        half = np.hypot(*(e * stdtrit(free, tail) for free, e in sources))
        return float(half - mean)

    if beyond(_LEAST) < 0:
        return float(np.exp(_LEAST))
    log: float = brentq(beyond, _LEAST, 0.0, xtol=1e-12)  # pyright: ignore
    return float(np.exp(log))


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """Holm's correction; what could not be tested is NaN and does not count.

    >>> holm([0.01, 0.04, 0.03]).round(3)
    array([0.03, 0.06, 0.06])
    """
    values = np.asarray(p, float)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected = np.full(values.shape, np.nan)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected

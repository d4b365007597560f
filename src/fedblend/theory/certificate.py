# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Certificates: a number that proves how far a shared model is from the best one.

FLIX's objective f~ is mu_alpha-strongly convex (see ``constants``), so that for any
shared model, whatever found it::

    f~(x) - min f~ <= |grad f~(x)|^2 / (2 mu_alpha)

Bounds promise the left side before a run; the right side is measured on the way and is
as a rule far smaller. f~ is that of the local models x_i which the run has: it need not
know their distance from true minimizers.
"""

from typing import NamedTuple

import numpy as np

from fedblend.checks import POSITIVE
from fedblend.errors import SettingError
from fedblend.theory.constants import Smoothness, squared_alpha

RESOLUTION = {"float32": 1e-5, "float64": 1e-13}
"""The smallest difference of objectives of about 1 that sums in a precision resolve."""


class Certificate(NamedTuple):
    """What is known of a shared model; ``objective - min f~ <= gap``."""

    objective: float
    """f~, with its l2 penalty."""
    gradient_norm: float
    """|grad f~|."""
    gap: float
    """``gradient_norm**2 / (2 mu)``."""


def certify(objective: float, gradient_norm: float, mu: float) -> Certificate:
    """The certificate of an objective with these numbers at some point.

    Args:
        objective: its value.
        gradient_norm: the norm of its gradient.
        mu: it is strongly convex with this.

    >>> certify(0.7, 0.1, mu=0.5).gap
    0.010000000000000002
    """
    gap = gradient_norm**2 / (2 * POSITIVE("mu", mu))
    return Certificate(objective, gradient_norm, gap)


def weighted_mu(alpha, known: Smoothness, weights: np.ndarray) -> float:
    """``sum w_i alpha_i^2 mu_i / sum w_i``, which is mu_alpha where weights are equal.

    The strong convexity of ``sum w_i f_i(alpha_i x + (1-alpha_i) x_i) / sum w_i``.
    """
    return float(
        np.average(squared_alpha(alpha, known) * known.convex, weights=weights)
    )


def require_resolved(key: str, eps: float, precision: str) -> None:
    """Refuse an accuracy that is lost in rounding; ``key`` is where it was given."""
    least = RESOLUTION[precision]
    if eps < least:
        better = "" if precision == "float64" else '; run.precision = "float64" does'
        lost = f"{eps:g} is below {least:g}: {precision} does not resolve it{better}"
        raise SettingError(key, lost)

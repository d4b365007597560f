# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One round is enough for small alpha: how good x_avg is by itself.

For minimizers x_i, ``x_avg = sum w_i x_i`` with ``w_i ~ alpha_i^2 L_i`` (Theorem 1)::

    f~(x_avg) - min f~ <= f~(x_avg) - mean f_i(x_i) <= L_alpha V/2

For stationary points of f_i that may be nonconvex, ``w_i ~ alpha_i^4 L_i^2`` (Theorem
3)::

    |grad f~(x_avg)|^2 <= mean (alpha_i^2 L_i)^2 V'

Where this differs from the paper: unequal alpha use the two lines above, which are
never larger than the printed forms with D (``by_diameter``). The statement of Theorem
3 repeats the condition of Theorem 1; its proof has ``(eps^2/(M D))^(1/4)``, used here,
and V' is the variance under its own weights. Reference: see ``flix_objective``.
"""

import math

import numpy as np

from fedblend.checks import POSITIVE
from fedblend.core import PyTree
from fedblend.theory.constants import Smoothness
from fedblend.theory.flix_objective import (
    D,
    M,
    Mixture,
    V,
    smoothness_of_parts,
    squared_alpha,
    stationary_weights,
)


def require_minimizers(gradient_norms, tolerance: float = 1e-6) -> None:
    """Refuse pure local models that do not minimize f_i, by their gradient norms.

    A client with one class and no l2 has no minimizer, and bounds by V, D or min f_i do
    not hold for it.
    """
    norms = np.asarray(gradient_norms, np.float64)
    wrong = np.flatnonzero(~(norms <= tolerance))
    if wrong.size:
        raise ValueError(
            f"personal: client {wrong[0]} has gradient norm {norms[wrong[0]]:.2g}, "
            f"over {tolerance:g} ({wrong.size} of {norms.size} clients): no bound holds"
        )


def one_shot(known: Mixture) -> float:
    """``f~(x_avg) - min f~ <= L_alpha V/2`` (Theorem 1; for equal alpha b^2 L V/2)."""
    return known.L_alpha * known.V / 2


def one_shot_by_diameter(known: Mixture) -> float:
    """``max alpha^2 mean(L_i) D/2``: Theorem 1 as printed for unequal alpha."""
    return float(known.alpha.max()) ** 2 * known.mean_smooth * known.D / 2


def one_shot_alpha(eps: float, smoothness: Smoothness, spread: float) -> float:
    """The largest alpha with which x_avg is eps-optimal: ``sqrt(2 eps/(L spread))``.

    Args:
        eps: allowed distance of f~(x_avg) from the smallest value.
        smoothness: of all f_i; L is the mean of L_i.
        spread: V if all alpha are equal, D if they only are at most this.
    """
    return _capped(
        2 * POSITIVE("eps", eps), float(smoothness.smooth.mean()) * spread, 1 / 2
    )


def one_shot_gradient(alpha, smoothness: Smoothness, personal: PyTree) -> float:
    """``|grad f~(x_avg)| <= sqrt(mean l_i^2 V')`` for stationary points (Theorem 3).

    V' and x_avg are those under ``stationary_weights``; f_i need not be convex.
    """
    own = stationary_weights(alpha, smoothness)
    squares = smoothness_of_parts(alpha, smoothness) ** 2
    return math.sqrt(float(np.mean(squares)) * V(personal, own))


def one_shot_gradient_by_diameter(
    alpha, smoothness: Smoothness, personal: PyTree
) -> float:
    """``max alpha^2 sqrt(M D)``: Theorem 3 as proved for unequal alpha."""
    largest = float(squared_alpha(alpha, smoothness).max())
    return largest * math.sqrt(M(smoothness) * D(personal))


def one_shot_gradient_alpha(eps: float, smoothness: Smoothness, spread: float) -> float:
    """The largest alpha with ``|grad f~(x_avg)| <= eps``: ``(eps^2/(M spread))^(1/4)``.

    ``spread`` is V' (see ``one_shot_gradient``) if all alpha are equal, else D.
    """
    return _capped(POSITIVE("eps", eps) ** 2, M(smoothness) * spread, 1 / 4)


def _capped(top: float, bottom: float, power: float) -> float:
    """``(top/bottom)^power``, at most 1, and 1 where bottom is 0."""
    return min((top / bottom) ** power, 1.0) if bottom > 0 else 1.0

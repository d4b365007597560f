# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Warnings of steps that are longer than theory knows to be stable.

They are of methods whose coin ends a round: between two communications a client is on
its own, and steps beyond 2/L_i drive it away from the others. A given rate is allowed
all the same: L_i are upper bounds, of the full rows.
"""

from typing import Any

import numpy as np

from fedblend.config.config import Config
from fedblend.theory.constants import Smoothness, smoothness_of_parts, squared_alpha
from fedblend.theory.local_training import relaxed, stable_moved


def warnings(
    config: Config, known: Smoothness | None, dim: int, clients: int
) -> list[str]:
    """What may diverge, of a method with a coin and a given rate.

    Args:
        config: what to run.
        known: the constants of all clients, None where they are unknown.
        dim: parameters of the model.
        clients: how many there are.
    """
    options: Any = config.algorithm
    if not options.entry.coin or not isinstance(options.rate, float | int):
        return []
    alpha = np.asarray(1.0 if options.alpha is None else options.alpha, float)
    found, moved = [], getattr(options, "moved", None)
    if moved is not None:
        least = 0.0
        if known is not None:
            least = float((squared_alpha(alpha, known) * known.convex).min())
        found += _of_moved(options, least, dim, clients)
    if known is None:
        return found
    parts = (
        known.smooth if options.entry.own_rates else smoothness_of_parts(alpha, known)
    )
    longest = 2 / max(float(parts.max()) - (moved or 0.0), moved or 0.0)
    if options.rate >= longest:
        found.append(
            f"algorithm.rate: {options.rate:g} is not below {longest:.3g}, 2/L of the "
            'clients\' losses; local steps may diverge. "theory" chooses a rate'
        )
    return found


def _of_moved(options: Any, least: float, dim: int, clients: int) -> list[str]:
    """Of LoCoDL: more than the convexity of all losses moved to the common function."""
    if options.moved < least:
        return []
    omega = float(np.max(options.compressor.make({}).omega(dim)))
    dual = relaxed(omega, clients, options.masks)[1]
    stable = stable_moved(options.rate, 1 / options.steps, dual)
    if options.moved <= stable:
        return []
    return [
        f"algorithm.moved: {options.moved:g} is above {max(stable, least / 2):.2g}, "
        "and the clients' losses are not known to be so convex; LoCoDL may diverge. "
        "Without the key it is chosen"
    ]

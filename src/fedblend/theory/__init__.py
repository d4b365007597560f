# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is known in advance: constants, steps, bounds, plans, the cost of privacy."""

from fedblend.theory import (
    apfl,
    bounds,
    constants,
    diversity,
    generalization,
    mixed_fl,
    one_shot,
    plan,
    privacy,
    steps,
)
from fedblend.theory.bounds import predicted
from fedblend.theory.constants import Smoothness
from fedblend.theory.flix_objective import Mixture, mixture, stationary_weights, weights
from fedblend.theory.plan import (
    Plan,
    Solver,
    Traffic,
    largest_alpha,
    largest_alpha_for_bits,
    rounds_needed,
    table,
)

__all__ = [
    "Mixture",
    "Plan",
    "Smoothness",
    "Solver",
    "Traffic",
    "apfl",
    "bounds",
    "constants",
    "diversity",
    "generalization",
    "largest_alpha",
    "largest_alpha_for_bits",
    "mixed_fl",
    "mixture",
    "one_shot",
    "plan",
    "predicted",
    "privacy",
    "rounds_needed",
    "stationary_weights",
    "steps",
    "table",
    "weights",
]

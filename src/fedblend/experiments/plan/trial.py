# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How many rounds a candidate takes when it is run, until its certificate says so.

Whoever plans with the rows at hand runs the solver itself: with the x_i of the plan, in
the precision and with the first seed of the configuration. The certificate is looked at
after every round at first, later after every twentieth of the rounds so far.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedblend.config.config import Config
from fedblend.experiments.plan.messages import built_for, run_of, spent
from fedblend.experiments.plan.problem import Problem
from fedblend.simulation.certify import certificates
from fedblend.theory.constants import mu_alpha
from fedblend.trees import precision

PART = 20
"""Looks are apart by the rounds so far divided by this."""
BLOCK = 256
"""Rounds between two looks at most."""
MARGIN = 0.95
"""The part of eps at which a trial ends: x_i of a run are found less exactly."""


class Trial(NamedTuple):
    """A run that ended at its certificate, or was given up."""

    rounds: int
    """That of x_avg included."""
    up: int
    down: int
    """Bits of all clients, with the last broadcast."""
    gap: float
    """The certificate."""
    arrived: bool


def trial(
    found: Problem,
    config: Config,
    eps: float,
    most: int,
    too_much: Callable[[int, int], bool] = lambda up, down: False,
) -> Trial:
    """Run a configuration until its certificate is below eps.

    Args:
        found: its problem.
        config: with alpha.
        eps: the accuracy.
        most: rounds after which it is given up.
        too_much: whether these bits, up and down, are more than anybody would pay.
    """
    options: Any = config.algorithm
    mu = mu_alpha(options.alpha, found.smoothness)
    with precision(config.run.precision):
        made = built_for(found, config)
        run = run_of(found, config, made, every=BLOCK, rounds=BLOCK)
        next(iter(run))
        while True:
            gap = certificates(run, made.loss, mu)[0].gap
            bits = spent(run)
            arrived = gap <= MARGIN * eps
            if arrived or run.round >= most or too_much(*bits):
                return Trial(run.round + 1, *bits, gap, arrived)
            ahead = min(max(run.round // PART, 1), BLOCK)
            run.rounds = min(run.round + ahead, most)
            run.complete()

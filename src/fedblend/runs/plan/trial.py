# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How many rounds a candidate takes when it is run, until its certificate says so.

Whoever plans with the rows at hand runs the solver itself: with the x_i of the plan, in
the precision of the configuration, and with some seeds side by side. The certificate is
looked at after every round at first, later after every twentieth of the rounds so far.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from fedblend.config.build import Method
from fedblend.config.config import Config
from fedblend.config.theory_rates import rates
from fedblend.core import Algorithm, Key
from fedblend.runs.plan.messages import built_for, run_of
from fedblend.runs.plan.problem import Problem
from fedblend.simulation.certify import certificates
from fedblend.simulation.run import Run
from fedblend.theory.constants import mu_alpha
from fedblend.trees import precision

PART = 20
"""Looks are apart by the rounds so far divided by this."""
BLOCK = 256
"""Rounds between two looks at most."""
MARGIN = 0.95
"""The part of eps at which a trial ends: x_i of a run are found less exactly."""


class Trials:
    """Trials of a configuration with any 1/p, whose programs compile once.

    Args:
        found: the problem.
        config: a candidate's, with alpha.
        eps: the accuracy.
    """

    def __init__(self, found: Problem, config: Config, eps: float):
        self._found, self._config, self._eps = found, config, eps
        options: Any = config.algorithm
        self._mu = mu_alpha(options.alpha, found.smoothness)
        self._rates = rates(config, found.smoothness, found.personal.shape[1])
        with precision(config.run.precision):
            self._loss = self._method(None).loss
        self._last: Run | None = None

    def run(self, keys: Key, steps: int | None, most: float) -> np.ndarray:
        """The rounds of each seed, that of x_avg included.

        Args:
            keys: the seeds, as many in every call.
            steps: 1/p; None for a solver without a coin.
            most: mean rounds after which a trial is given up: seeds that have not
                arrived then have infinitely many.
        """
        with precision(self._config.run.precision):
            run = self._begun(keys, steps)
            rounds = np.full(len(keys), np.inf)
            while True:
                found = certificates(run, self._loss, self._mu)
                arrived = np.array([one.gap for one in found]) <= MARGIN * self._eps
                rounds[arrived] = np.minimum(rounds[arrived], run.round + 1)
                least = np.minimum(rounds, run.round + 2).mean()
                if np.isfinite(rounds).all() or least > most:
                    return rounds
                run.rounds += min(max(run.round // PART, 1), BLOCK)
                run.complete()

    def _begun(self, keys: Key, steps: int | None) -> Run:
        """A run at x_avg. 1/p is an argument of its programs, which all runs share."""

        def algorithm(steps: Any) -> Algorithm:
            return self._method(steps).algorithm

        over = None if steps is None else jnp.full(len(keys), steps)
        made = algorithm(None) if over is None else algorithm
        options: Any = {"rounds": BLOCK, "every": BLOCK, "over": over}
        run = run_of(self._found, self._config, made, key=keys, **options)
        if self._last is not None:
            run.share_programs(self._last)
        self._last = run
        next(iter(run))
        run.rounds = 0
        return run

    def _method(self, steps: Any) -> Method:
        config = self._config
        if steps is not None:
            coin = config.algorithm.model_copy(update={"steps": steps})
            config = config.model_copy(update={"algorithm": coin})
        return built_for(self._found, config, self._rates)

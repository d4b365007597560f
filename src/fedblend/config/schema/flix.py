# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX as a configuration states it.

``flix`` takes one gradient a round, of all rows or of a batch; ``flix_local`` is the
method with more local steps, which is another one. ``personal`` says how a client finds
its own model x_i.
"""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from fedblend import algorithms, mixing, solvers
from fedblend.config.schema.algorithm import Options, amount_of_work
from fedblend.config.schema.local_work import Rule, transform
from fedblend.config.schema.table import (
    ConfigError,
    Count,
    Fraction,
    Mixing,
    Positive,
    Table,
)
from fedblend.core import Algorithm, Loss
from fedblend.local import Work
from fedblend.theory.constants import Smoothness


class Exact(Table):
    """To a small gradient, for convex models."""

    solver: Literal["lbfgs", "newton"]
    tolerance: Positive = 1e-5
    most: Count = 500

    def make(self, loss: Loss, known: Smoothness | None) -> solvers.Solver:
        """The solver."""
        del known
        solve = getattr(solvers, self.solver)
        return solve(loss, tolerance=self.tolerance, most=self.most)


class Descent(Table):
    """Gradient descent with the step 1/L_i, where L_i is known."""

    solver: Literal["gradient_descent"]
    tolerance: Positive = 1e-5
    most: Count = 10_000

    def make(self, loss: Loss, known: Smoothness | None) -> solvers.Solver:
        """The solver."""
        if known is None:
            raise ConfigError(
                'algorithm.personal.solver: "gradient_descent" takes the step 1/L_i, '
                "and L_i is known for linear models only; lbfgs needs none"
            )
        return solvers.gradient_descent(
            loss, known.smooth, tolerance=self.tolerance, most=self.most
        )


class Patient(Table):
    """Until held-out rows of the client say stop, for networks."""

    solver: Literal["sgd"]
    rate: Positive
    steps: Count
    batch_size: Count
    validation: Fraction = 0.2
    patience: Count = 3
    turns: Count = 50

    def make(self, loss: Loss, known: Smoothness | None) -> solvers.Solver:
        """The solver."""
        del known
        return solvers.patient_sgd(
            loss,
            Work(self.rate, self.steps, self.batch_size),
            validation=self.validation,
            patience=self.patience,
            turns=self.turns,
        )


class _Flix(Options):
    mixes: ClassVar[bool] = True

    alpha: Mixing | list[Mixing]  # pyright: ignore
    mix: Literal["parameters", "outputs"] = "parameters"
    personal: Annotated[Exact | Descent | Patient, Field(discriminator="solver")]
    server: Rule | None = None


class Flix(_Flix):
    """Options of FLIX."""

    name: Literal["flix"]
    rate: Positive | Literal["theory"] | None = None  # pyright: ignore

    @model_validator(mode="after")
    def _one_gradient(self) -> "Flix":
        if self.steps != 1:
            raise ValueError(
                "steps: flix takes one gradient a round, steps = 1; more local steps "
                "are the method flix_local"
            )
        return self


class FlixLocal(_Flix):
    """Options of FLIX with local steps."""

    name: Literal["flix_local"]


def flix(loss: Loss, options: Any, known: Smoothness | None = None) -> Algorithm:
    """FLIX over FedAvg, or FedOpt where the server has an optimizer.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        options: the table ``[algorithm]``, its rate a number.
        known: L_i, for the weights of x_avg; where they are not known all count alike.
    """
    work = amount_of_work(options)
    if options.server is None:
        method = partial(algorithms.fedavg, work=Work(options.chosen(), **work))
    else:
        method = partial(
            algorithms.fedopt,
            work=Work(options.chosen(), **work),
            server_optimizer=transform(options.server),
        )
    alpha = options.alpha
    return algorithms.flix(
        loss,
        method,
        alpha=np.array(alpha) if isinstance(alpha, list) else alpha,
        local=options.personal.make(loss, known),
        smooth=1.0 if known is None else known.smooth,
        mix=getattr(mixing, options.mix),
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What theory knows of a configuration: constants of f_i, and the step they allow.

Constants are known for models that are linear in their inputs, with the losses of
logistic regression, softmax regression and least squares. ``rate = "theory"`` and plans
rest on theorems about plain gradient descent in which everybody takes part.
"""

from typing import Any

import numpy as np

from fedblend.config.config import Config
from fedblend.config.schema.tables import Compress, ModelChoice
from fedblend.config.toml import literal
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError
from fedblend.theory import constants, steps
from fedblend.theory.constants import Smoothness
from fedblend.theory.flix_objective import mu_alpha
from fedblend.theory.plan import DGD, Solver

LINEAR = ("softmax", "logistic")
"""Models that are linear in their inputs."""
_BY_LOSS = {
    "logistic": constants.logistic,
    "cross_entropy": constants.softmax,
    "squared_error": constants.least_squares,
}


def smoothness(
    choice: ModelChoice, loss: str, federated_data: FederatedData
) -> Smoothness | None:
    """L_i and mu_i of every client, or None where they are not known.

    Args:
        choice: the table ``[model]``.
        loss: the name of the loss.
        federated_data: the clients' rows.
    """
    if not has_constants(choice, loss):
        return None
    return _BY_LOSS[loss](federated_data, choice.l2, choice.model_dump()["intercept"])


def has_constants(choice: ModelChoice, loss: str) -> bool:
    """Whether theory has constants for a model and the loss of that name."""
    return choice.model_dump()["name"] in LINEAR and loss in _BY_LOSS


def require_known(known: Smoothness | None, where: str) -> Smoothness:
    """Refuse a model whose constants are not known; ``where`` they are needed."""
    if known is None:
        raise ConfigError(
            f"{where}: needs constants L_i, which theory has for the models "
            f"{' and '.join(LINEAR)} with the losses {', '.join(_BY_LOSS)} only"
        )
    return known


def require_assumptions(config: Config, clients: int | None = None) -> None:
    """Refuse what the theorems are not about; ``clients`` once they are known."""
    options: Any = config.algorithm
    run = config.run
    cohort = None if run.cohort == clients else run.cohort
    for key, value, allowed in (
        ("algorithm.batch_size", options.batch_size, ("all",)),
        ("algorithm.optimizer", options.optimizer, (None,)),
        ("algorithm.schedule", options.schedule, (None,)),
        ("algorithm.server", options.server, (None,)),
        ("algorithm.mix", options.mix, ("parameters",)),
        ("run.cohort", cohort if clients else None, (None,)),
        ("populations", config.populations, (None,)),
        ("run.weights", run.weights, ("uniform", None)),
        ("run.dropout", run.dropout, (0.0,)),
        ("run.reduction", run.reduction, ("mean",)),
    ):
        if value not in allowed:
            shown = literal(value) if isinstance(value, str | int | float) else "given"
            wanted = "nothing" if allowed[0] is None else literal(allowed[0])
            raise ConfigError(f"{key}: is {shown}; theory needs {wanted} there")


def solver(table: Compress | None, dim: int, clients: int) -> Solver:
    """What ``[compress]`` makes of gradient descent, in the words of theory.

    Args:
        table: the table, None without compression.
        dim: parameters of the model.
        clients: how many there are.

    Raises:
        ConfigError: theory has no step for it.
    """
    if table is None:
        return DGD
    chosen = table.compressor.make({})
    if table.how == "ef21" or chosen.omega is None:
        what = "ef21" if table.how == "ef21" else f"{chosen.name}, which is biased"
        key = "how" if table.how == "ef21" else "compressor"
        raise ConfigError(
            f"compress.{key}: theory has no step for {what}; it needs an unbiased "
            'compressor under "diana" or "plain"'
        )
    omega = chosen.omega(dim)
    if table.how == "plain":
        return Solver("dcgd", omega)
    rate = None if table.rate is None else np.asarray(table.rate)
    try:
        steps.memory_rates(omega, clients, rate)
    except ValueError as error:
        reason = str(error).partition(": ")[2]
        raise ConfigError(f"compress.rate: {reason}") from None
    return Solver("diana", omega, rate)


def step(way: Solver, alpha: Any, known: Smoothness) -> float:
    """The step that theory allows a solver, a quarter of it without strong convexity.

    Args:
        way: the solver.
        alpha: the weight of the shared model, a number or one for every client.
        known: the constants of all clients.
    """
    flat = "" if mu_alpha(alpha, known) > 0 else "_convex"
    if way.name == "diana":
        rule = getattr(steps, f"diana{flat}")
        return rule(alpha, known, way.omega, way.memory_rate)
    if way.name == "dcgd":
        return getattr(steps, f"dcgd{flat}")(alpha, known, way.omega)
    return steps.dgd(alpha, known)


def with_rates(config: Config, known: Smoothness | None, dim: int) -> tuple[Any, Any]:
    """The options with ``rate = "theory"`` as a number, and those of training alone.

    Alone it is ``1/max L_i``: the step of FLIX grows like 1/alpha^2, which is right for
    the mixture and far too long for a model by itself.
    """
    options: Any = config.algorithm
    if options.rate != "theory":
        return options, options
    known = require_known(known, 'algorithm.rate: "theory"')
    clients = len(known.smooth)
    require_assumptions(config, clients)
    way = solver(config.compress, dim, clients)
    together = step(way, np.asarray(options.alpha), known)
    alone = 1 / float(known.smooth.max())
    return tuple(
        options.model_copy(update={"rate": rate}) for rate in (together, alone)
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What theory says of a configuration: constants of the losses, rates, warnings.

Constants of f_i are known for models that are linear in their inputs, with the losses
of logistic regression, softmax regression and least squares. ``rate = "theory"`` and
plans rest on theorems about plain gradient descent in which every client takes part.
A given rate is allowed even where theory knows none to be stable: L_i are upper bounds,
of the full rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedblend.config.table import NO_VALUES, Values
from fedblend.config.tables.compress import Compress, contraction
from fedblend.config.tables.model import CONSTANTS, LINEAR
from fedblend.config.toml import literal
from fedblend.errors import ConfigError
from fedblend.theory import steps
from fedblend.theory.constants import (
    Smoothness,
    mu_alpha,
    smoothness_of_parts,
    together,
)
from fedblend.theory.steps import DGD, Solver

if TYPE_CHECKING:
    from fedblend.config.config import Config


def asks_for_constants(config: "Config") -> bool:
    """Whether the algorithm weighs or steps by constants of the clients' losses."""
    options = config.algorithm
    return "smooth" in options.entry.parameters or options.rate == "theory"


def require_known(known: Smoothness | None, where: str) -> Smoothness:
    """Refuse a model whose constants are not known; ``where`` they are needed."""
    if known is None:
        raise ConfigError(
            f"{where}: needs the smoothness constant L_i of every client, which is "
            f"known for the models {' and '.join(LINEAR)} with the losses "
            f"{', '.join(CONSTANTS)} only"
        )
    return known


def require_assumptions(config: "Config", clients: int | None = None) -> None:
    """Refuse what the theorems are not about; ``clients`` once they are known."""
    options: Any = config.algorithm
    run, server = config.run, getattr(options, "server", None)
    cohort = None if run.cohort == clients else run.cohort
    for key, value, allowed in (
        ("algorithm.batch_size", options.batch_size, ("all",)),
        ("algorithm.optimizer", options.optimizer, (None,)),
        ("algorithm.schedule", options.schedule, (None,)),
        ("algorithm.server", None if _accelerates(options) else server, (None,)),
        ("algorithm.mix", getattr(options, "mix", "parameters"), ("parameters",)),
        ("run.cohort", cohort if clients else None, (None,)),
        ("populations", config.populations, (None,)),
        ("run.weights", run.weights, ("uniform", None)),
        ("run.dropout", run.dropout, (0.0,)),
        ("run.reduction", run.reduction, ("mean",)),
    ):
        if value not in allowed:
            shown = literal(value) if isinstance(value, str | int | float) else "given"
            wanted = "it left out" if allowed[0] is None else literal(allowed[0])
            raise ConfigError(f"{key}: is {shown}; theory needs {wanted}")


def _accelerates(options: Any) -> bool:
    """Whether the server has theory's momentum, and no other rate than one."""
    server: Any = getattr(options, "server", None)
    return getattr(server, "takes_theory", False) and server.rate == 1


def solver(
    table: Compress | None, dim: int, clients: int, *, accelerates: bool = False
) -> Solver:
    """What ``[compress]`` makes of gradient descent, in the words of theory.

    Args:
        table: the table, None without compression.
        dim: parameters of the model.
        clients: how many there are.
        accelerates: whether the server has theory's momentum.

    Raises:
        ConfigError: theory has no step for it.
    """
    if table is None:
        return Solver("accelerated") if accelerates else DGD
    if accelerates:
        raise ConfigError(
            "compress: is given; theory has no step for momentum with compression"
        )
    if table.down is not None:
        if table.compressor is not None or table.how == "perm_k":
            raise ConfigError(
                "compress.down: theory has no step for compression both ways; leave "
                "it out, or compress.compressor"
            )
        return Solver("downlink", delta=contraction("down", table.down.make(), dim))
    if table.how == "perm_k":
        return Solver("perm_k")
    assert table.compressor is not None  # the table demands one
    chosen = table.compressor.make()
    if table.how == "ef21":
        return Solver("ef21", delta=contraction("compressor", chosen, dim))
    if chosen.omega is None:
        raise ConfigError(
            f"compress.compressor: theory has no step for {chosen.name}, which is "
            'biased; it needs an unbiased compressor under "diana" or "plain", or '
            'compress.how = "ef21"'
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
    """The step that theory allows a solver; less of it without strong convexity.

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
    if way.name == "perm_k":
        return getattr(steps, f"perm_k{flat}")(alpha, known)
    if way.name in ("ef21", "downlink"):
        return getattr(steps, way.name)(alpha, known, way.delta)
    return steps.dgd(alpha, known)


def momentum(way: Solver, alpha: Any, known: Smoothness) -> float:
    """The momentum that theory gives the server, 0 for other solvers.

    Arguments as for ``step``.

    Raises:
        ConfigError: f~ is not strongly convex.
    """
    if way.name != "accelerated":
        return 0.0
    if np.any(alpha) and mu_alpha(alpha, known) <= 0:
        raise ConfigError(
            "algorithm.server.momentum: theory has one for strongly convex f~, and "
            "mu_alpha is 0; model.l2 above 0 gives it"
        )
    return steps.accelerated(alpha, known).momentum


class Rates(NamedTuple):
    """In place of the word "theory": the rates, and the server's momentum or 0.

    Alone it is ``1/max L_i``: the step of FLIX grows like 1/alpha^2, which is right for
    the mixture and far too long for a model by itself.
    """

    together: Any
    alone: Any
    momentum: Any = 0.0


def rates(config: "Config", known: Smoothness | None, dim: int) -> Rates:
    """What ``rate = "theory"`` stands for, by the constants of all clients.

    Raises:
        ConfigError: theory has no step for the configuration.
    """
    known = require_known(known, 'algorithm.rate: "theory"')
    clients = len(known.smooth)
    require_assumptions(config, clients)
    options: Any = config.algorithm
    alone, alpha = 1 / float(known.smooth.max()), np.asarray(options.alpha)
    if options.entry.coin and config.compress is not None:
        raise ConfigError(
            f"compress: is given; theory has no step for {options.name} with it"
        )
    if options.entry.own_rates:
        return Rates(alone, alone)
    if options.entry.coin:
        return Rates(float(options.local_training(known, dim).rates[0]), alone)
    way = solver(config.compress, dim, clients, accelerates=_accelerates(options))
    if config.compress is not None and config.compress.masks == "one":
        # Clients with one mask are, together, one client with the objective f~.
        known, alpha = together(alpha, known), np.ones(1)
    return Rates(step(way, alpha, known), alone, momentum(way, alpha, known))


def choose_steps(config: "Config", known: Smoothness | None, dim: int) -> "Config":
    """The configuration with a number in place of ``steps = "theory"``."""
    options: Any = config.algorithm
    if options.steps != "theory":
        return config
    known = require_known(known, 'algorithm.steps: "theory"')
    number = options.local_training(known, dim).steps
    own = options.model_copy(update={"steps": number})
    return config.model_copy(update={"algorithm": own})


def theory_values(
    config: "Config",
    known: Smoothness | None,
    dim: int,
    found: Sequence[Any] | None = None,
) -> tuple[Values, Values]:
    """Numbers for "theory" in ``[algorithm]``, and those of training alone.

    ``found`` are ``Rates``, where they are known. An algorithm with a rate for every
    client finds it itself.
    """
    options: Any = config.algorithm
    if options.rate != "theory":
        return NO_VALUES, NO_VALUES
    together, alone, own = rates(config, known, dim) if found is None else found
    return options.substitute_theory(together, own), {"rate": alone}


def warnings(config: "Config", known: Smoothness | None) -> list[str]:
    """A given rate that may diverge, of a method with a coin.

    Args:
        config: what to run.
        known: the constants of all clients, None where they are unknown.
    """
    options: Any = config.algorithm
    if not options.entry.coin or not isinstance(options.rate, float | int):
        return []
    if known is None:
        return []
    moved = getattr(options, "moved", None) or 0.0
    parts = known.smooth
    if not options.entry.own_rates:
        alpha = np.asarray(1.0 if options.alpha is None else options.alpha, float)
        parts = smoothness_of_parts(alpha, known)
    longest = 2 / max(float(parts.max()) - moved, moved)
    if options.rate < longest:
        return []
    return [
        f"algorithm.rate: {options.rate:g} is not below {longest:.3g}, 2/L of the "
        'clients\' losses; local steps may diverge. "theory" chooses a rate'
    ]

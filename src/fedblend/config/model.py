# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The model of a configuration: its loss, its constants and their step.

Constants of f_i are known for models that are linear in their inputs, with the losses
of logistic regression, softmax regression and least squares. ``rate = "theory"`` and
plans rest on theorems about plain gradient descent in which everybody takes part.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedblend import losses, models
from fedblend.config.config import Config
from fedblend.config.imported_model import imported_model
from fedblend.config.model_form import formed
from fedblend.config.schema.tables import Compress, CompressorTable, ModelChoice
from fedblend.config.toml import literal
from fedblend.core import Loss
from fedblend.data.dataset import Task
from fedblend.data.federated import FederatedData
from fedblend.errors import ConfigError
from fedblend.mixing import Apply
from fedblend.models.model import in_unit
from fedblend.theory import constants, steps
from fedblend.theory.constants import Smoothness, mu_alpha, together
from fedblend.theory.plan import DGD, Solver

_LOSSES = {
    "classes": "cross_entropy",
    "binary": "logistic",
    "regression": "squared_error",
    "sequence": "sequence_cross_entropy",
    "tags": "multilabel",
}
_KINDS = {
    "cross_entropy": ("classes", "binary"),
    "logistic": ("binary",),
    "squared_error": ("regression",),
    "sequence_cross_entropy": ("sequence",),
    "multilabel": ("tags",),
    "hinge": ("classes",),
}
_OWN_LOSSES = {"dual_encoder": "hinge"}
"""Of models that have a loss of their own."""
LINEAR = ("softmax", "logistic")
"""Models that are linear in their inputs."""
SEQUENCES = ("char_rnn", "transformer")
"""Models with scores at every place of a sequence."""
_BY_LOSS = {
    "logistic": constants.logistic,
    "cross_entropy": constants.softmax,
    "squared_error": constants.least_squares,
}


def loss_name(config: Config, task: Task) -> str:
    """The loss of ``[model]``, or the usual one of the task."""
    own = _OWN_LOSSES.get(config.model.name, _LOSSES[task.kind])
    return config.model.loss or own


def losses_of(config: Config, name: str, apply: Apply, task: Task) -> tuple[Loss, Loss]:
    """The loss of that name as it is measured, and as it is trained on.

    The latter has the l2 term, and its unit is the scale of the targets.
    """
    if name == "hinge":
        plain = models.dual_encoder_loss()
    else:
        plain = getattr(losses, name)(apply)
    loss = plain if task.scale == 1 else losses.divide(plain, task.scale**2)
    return plain, losses.l2(loss, config.model.l2) if config.model.l2 else loss


def model_of(config: Config, task: Task, loss: str) -> models.Model:
    """The model of a configuration, for the task; ``loss`` is the name of its loss.

    An algorithm may ask for another form of it, such as an ensemble of several.
    """
    model = _one_model(config, task, loss)
    if (task.center, task.scale) != (0, 1):
        model = in_unit(model, task.center, task.scale)
    if config.model.products is not None:
        model = models.with_products(model, config.model.products)
    return formed(config, model, task, loss)


def _one_model(config: Config, task: Task, loss: str) -> models.Model:
    choice = config.model
    if task.kind not in _KINDS[loss]:
        raise ConfigError(
            f'model.loss: "{loss}" is not for {task.kind} targets; it needs '
            f"{' or '.join(_KINDS[loss])}"
        )
    options = choice.model_dump(exclude={"name", "l2", "loss", "ensemble", "products"})
    name = config.model.name
    if name == "logistic" and task.kind == "regression" and choice.loss is None:
        raise ConfigError(
            'model.name: "logistic" is for two classes, and the targets are real '
            'numbers; data.kind = "binary" takes two numbers as classes, model.loss = '
            '"squared_error" makes it a linear model'
        )
    if loss == "hinge" and name != "dual_encoder":
        raise ConfigError(f"model.loss: \"hinge\" is dual_encoder's, not {name}'s")
    outputs = 2 if task.kind == "binary" and loss == "cross_entropy" else task.outputs
    own = imported_model(choice, task, outputs, config.run.precision)
    if own is not None:
        return own
    if (name in SEQUENCES) != (task.kind == "sequence"):
        kind = "sequences" if name in SEQUENCES else "single rows"
        raise ConfigError(
            f'model.name: "{name}" is for {kind}, not for {task.kind} targets'
        )
    binary = task.kind == "binary"
    if binary and name == "logistic" and loss == "cross_entropy":
        raise ConfigError(
            'model.loss: "cross_entropy" needs a score for each class, and logistic '
            "has a single one"
        )
    try:
        return models.build(
            name,
            task.shape,
            outputs,
            **options,
            dtype=jnp.dtype(config.run.precision),
        )
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None


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
    one = choice.name in LINEAR and choice.ensemble is None
    return one and loss in _BY_LOSS


def asks_for_constants(config: Config) -> bool:
    """Whether the algorithm weighs or steps by constants of the clients' losses."""
    options = config.algorithm
    return "smooth" in options.entry.parameters or options.rate == "theory"


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
        ("algorithm.server", _other_server(options), (None,)),
        ("algorithm.mix", getattr(options, "mix", "parameters"), ("parameters",)),
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


def _accelerates(options: Any) -> bool:
    """Whether the server has theory's momentum, and no other rate than one."""
    server: Any = getattr(options, "server", None)
    return getattr(server, "from_theory", False) and server.rate == 1


def _other_server(options: Any) -> Any:
    """An optimizer of the server that theory does not know."""
    return None if _accelerates(options) else getattr(options, "server", None)


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
        return Solver("downlink", delta=_delta("down", table.down, dim))
    if table.how == "perm_k":
        return Solver("perm_k")
    assert table.compressor is not None  # the table demands one
    if table.how == "ef21":
        return Solver("ef21", delta=_delta("compressor", table.compressor, dim))
    chosen = table.compressor.make({})
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


def _delta(key: str, table: CompressorTable, dim: int) -> Any:
    made = table.make({})
    found = None if made.delta is None else made.delta(dim)
    if found is None or not np.min(found) > 0:
        raise ConfigError(
            f"compress.{key}: {made.name} does not contract {dim} parameters"
        )
    return found


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


def rates(config: Config, known: Smoothness | None, dim: int) -> Rates:
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


def with_steps(config: Config, known: Smoothness | None, dim: int) -> Config:
    """The configuration with a number in place of ``steps = "theory"``."""
    options: Any = config.algorithm
    if options.steps != "theory":
        return config
    known = require_known(known, 'algorithm.steps: "theory"')
    number = options.local_training(known, dim).steps
    own = options.model_copy(update={"steps": number})
    return config.model_copy(update={"algorithm": own})


def with_rates(
    config: Config,
    known: Smoothness | None,
    dim: int,
    found: Sequence[Any] | None = None,
) -> tuple[Any, Any]:
    """The options with numbers in place of "theory", and those of training alone.

    ``found`` are ``Rates``, where they are known. An algorithm with a rate for every
    client finds it itself.
    """
    options: Any = config.algorithm
    if options.rate != "theory":
        return options, options
    together, alone, own = rates(config, known, dim) if found is None else found
    found = [options.with_theory(rate, own) for rate in (together, alone)]
    return (options if options.entry.own_rates else found[0]), found[1]

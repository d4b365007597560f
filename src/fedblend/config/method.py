# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""From a configuration to its method: model, loss, algorithm, metrics.

L_i, and the rates that theory allows, come from the training rows of the clients, so
that they differ between seeds with splits of their own. Such seeds run side by side all
the same: the simulator sweeps over their constants.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.algorithms.local_only import local_only
from fedblend.config.config import Config
from fedblend.config.constants import require_known, smoothness, with_rates
from fedblend.config.schema.table import check_lists
from fedblend.config.tasks import loss_name, losses_of, measures_of, model_of
from fedblend.config.transforms import transformed
from fedblend.core import Algorithm, Loss
from fedblend.data.dataset import Task
from fedblend.data.federated import FederatedData
from fedblend.metrics import Metric
from fedblend.models import Model
from fedblend.theory.constants import Smoothness


class Method(NamedTuple):
    """What is computed, whoever has the rows."""

    model: Model
    loss: Loss
    algorithm: Algorithm
    local: Algorithm | None
    """Training alone with the same local work, if it is to be compared with."""
    measures: Mapping[str, Metric]
    smoothness: Smoothness | None
    """The constants of f_i, where the algorithm asks for them and they are known."""


def method(
    config: Config,
    task: Task,
    clients: int,
    cohort: int,
    constants: Callable[[str], Smoothness | None],
) -> Method:
    """The model, its loss, the algorithm with all that is wrapped around it.

    Args:
        config: what to run.
        task: what the rows are like.
        clients: how many there are.
        cohort: how many of them take part in a round.
        constants: those of the clients' losses, from the name of the loss; called only
            where the algorithm asks for them.
    """
    name = loss_name(config, task)
    model = model_of(config, task, name)
    plain, loss = losses_of(config, name, model.apply)
    options = config.algorithm
    check_lists("algorithm", options, clients)
    alone = config.measure.local and options.name != "local_only"
    params = jax.eval_shape(model.init, jax.random.key(0))
    known = constants(name) if "smooth" in options.entry.parameters else None
    options, own = with_rates(config, known, trees.size(params))
    algorithm = options.build(loss, known, clients)
    return Method(
        model,
        loss,
        transformed(config, algorithm, loss, params, clients, cohort),
        local_only(loss, own.work()) if alone else None,
        measures_of(config, task, plain, model.apply),
        known,
    )


class BySplit(NamedTuple):
    """What is computed where seeds have splits, and so constants, of their own.

    The algorithms are functions of an entry of ``over``, as ``simulate`` takes them.
    """

    algorithm: Callable[[Any], Algorithm]
    local: Callable[[Any], Algorithm] | None
    over: Any


def by_constants(
    config: Config,
    task: Task,
    found: Method,
    federations: Sequence[FederatedData],
    method_with: Callable[..., Method],
) -> BySplit:
    """The method with the constants of each split."""
    name = loss_name(config, task)
    known = [
        require_known(smoothness(config.model, name, one), "") for one in federations
    ]
    over: dict[str, Any] = {
        "smooth": np.stack([one.smooth for one in known]),
        "convex": np.stack([one.convex for one in known]),
    }
    in_theory = getattr(config.algorithm, "rate", None) == "theory"
    if in_theory:
        params = jax.eval_shape(found.model.init, jax.random.key(0))
        chosen = [with_rates(config, one, trees.size(params)) for one in known]
        over["rates"] = np.array([[pair[0].rate, pair[1].rate] for pair in chosen])

    def at(split: Any, place: int) -> Method:
        changed, own = (
            config,
            known[0]._replace(smooth=split["smooth"], convex=split["convex"]),
        )
        if in_theory:
            options = config.algorithm.model_copy(
                update={"rate": split["rates"][place]}
            )
            changed = config.model_copy(update={"algorithm": options})
        return method_with(changed, constants=lambda loss: own)

    def alone(split: Any) -> Algorithm:
        local = at(split, 1).local
        assert local is not None
        return local

    return BySplit(
        lambda split: at(split, 0).algorithm,
        None if found.local is None else alone,
        jax.tree.map(lambda values: jnp.asarray(values, float), over),
    )

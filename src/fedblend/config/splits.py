# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods whose constants are those of a split, where every seed has its own.

L_i, and the rates that theory allows, come from the training rows of the clients. So
they differ between seeds, which run side by side all the same: they are what the
simulator sweeps over.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.config.config import Config
from fedblend.config.constants import require_known, smoothness, with_rates
from fedblend.config.tasks import loss_name
from fedblend.core import Algorithm
from fedblend.data.federated import FederatedData
from fedblend.data.readers.read import Task

if TYPE_CHECKING:
    from fedblend.config.build import Method


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
    found: "Method",
    federations: Sequence[FederatedData],
    method_with: Callable[..., "Method"],
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

    def at(split: Any, place: int) -> "Method":
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

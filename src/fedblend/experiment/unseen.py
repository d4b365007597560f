# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The clients that a run sets apart: what its end is worth to those who join then.

``data.unseen`` is their fraction. They take no part in anything; after the last round
each gets a model from the shared one as any newcomer does, and both are measured.
"""

from typing import Any

import jax.numpy as jnp

from fedblend import trees
from fedblend.core import Down
from fedblend.experiment.build import Built
from fedblend.experiment.config import Config
from fedblend.experiment.newcomers import joining
from fedblend.experiment.tasks import loss_name
from fedblend.runtime.newcomers import Newcomers, personalise
from fedblend.runtime.run import Run


def join(run: Run, config: Config, built: Built) -> list[Newcomers]:
    """The unseen clients with their models, for each seed; empty where all are seen."""
    if built.unseen is None:
        return []
    name = loss_name(config, built.task)
    work = joining(config, (name, built.loss), built.unseen)
    lanes = [(run.shared, run.engine.key)]
    if run.lanes is not None:
        each = range(run.lanes)
        lanes = [(trees.take(run.shared, at), run.engine.key[at]) for at in each]
    return [
        personalise(
            work.algorithm,
            Down(shared, jnp.zeros((), jnp.int32)),
            built.unseen,
            key,
            visits=work.visits,
            measure=built.settings["measure"],
            splits=config.measure.splits,
        )
        for shared, key in lanes
    ]


def report(newcomers: Newcomers, round: int) -> dict[str, Any]:
    """What the summary of a run says of its unseen clients."""
    return {"unseen": {"round": round, **newcomers.summary()}}

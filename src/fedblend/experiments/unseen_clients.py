# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The clients that a run sets apart: what its end is worth to those who join then.

``data.unseen`` is their fraction. They take no part in anything; after the last round
each gets a model from the shared one as any newcomer does, and both are measured.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from fedblend import trees
from fedblend.config.build import Built
from fedblend.config.config import Config
from fedblend.config.tasks import loss_name
from fedblend.core import Down
from fedblend.experiments.newcomers import joining
from fedblend.gains import Evidence
from fedblend.simulation.personalize import NewClients, personalize
from fedblend.simulation.run import Run


def join(run: Run, config: Config, built: Built) -> list[NewClients]:
    """The unseen clients with their models, for each seed; empty where all are seen."""
    if not built.unseen:
        return []
    loss = (loss_name(config, built.task), built.loss)
    replicas = [(run.shared, run.key)]
    if run.replicas is not None:
        each = range(run.replicas)
        replicas = [(trees.take(run.shared, at), run.key[at]) for at in each]
    found = []
    for replica, (shared, key) in enumerate(replicas):
        newcomers = built.unseen[replica if len(built.unseen) > 1 else 0]
        work = joining(config, loss, newcomers)
        found.append(
            personalize(
                work.algorithm,
                Down(shared, jnp.zeros((), jnp.int32)),
                newcomers,
                key,
                visits=work.visits,
                measure=built.measures,
                splits=config.measure.splits,
            )
        )
    return found


def evidence(joined: Sequence[NewClients]) -> Evidence:
    """What all seeds say of the unseen clients together."""
    each = [newcomers.evidence for newcomers in joined]
    return Evidence(
        [one.measured[0] for one in each],
        [one.by_row[0] for one in each],
        each[0].counts,
        each[0].metrics,
    )

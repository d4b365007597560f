# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""L2GD by the mean number of local steps, as a configuration states it.

A round of ``l2gd`` is one communication after a random number of local steps, whose
mean is 1/p. Here that mean is ``work.steps``, so that an algorithm with the same local
work, such as training alone, takes as many steps.
"""

from typing import Any

import optax

from fedblend.algorithms.ditto import ditto
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.l2gd import l2gd
from fedblend.checks import NOT_NEGATIVE, gate, words
from fedblend.core import Algorithm, Loss
from fedblend.errors import UserError
from fedblend.local import WORK, Scheduled, Work
from fedblend.registry import NewClient, algorithm


def near(loss: Loss, work: Work, *, lam: float) -> Algorithm:
    """What a new client runs: the expected step of L2GD is Ditto's."""
    return ditto(fedavg(loss, work._replace(steps=1)), loss, work, lam=lam)


@algorithm(name="l2gd", builder=l2gd, new_client=NewClient(build=near))
@gate(**WORK, lam=NOT_NEGATIVE)
def l2gd_by_steps(loss: Loss, work: Work, *, lam: float) -> Algorithm:
    """L2GD with p = 1 / steps.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: the rate of the local steps, constant or scheduled over rounds; the mean
            number of local steps in a round, above 1; the rows of a step.
        lam: strength of the pull toward the mean, 0 or more.
    """
    rate: Any = work.optimizer
    steps = work.steps
    if not isinstance(steps, int) or steps < 2:
        allowed = "a mean number of steps in a round, above 1, the same for all clients"
        raise UserError("l2gd: work: steps", steps, allowed)
    if isinstance(rate, Scheduled) and rate.make is optax.sgd:
        words("round")("l2gd: work: schedule: unit", rate.unit)
        rate = rate.schedule
    if isinstance(rate, tuple):
        raise UserError("l2gd: work: optimizer", rate, "a rate", "an optimizer")
    return l2gd(loss, rate, lam=lam, p=1 / steps, batch_size=work.batch_size)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling: the room that cohorts of random size need, and its chance to fail.

Every one of n clients is in a round with the chance q = K/n, independently of all
others, so that the size of a cohort is binomial. Compiled programs have room for some
number of clients. A larger cohort is cut, which happens in a round with a probability
of ``OVERFLOW`` at most. Runs without and with this cut differ with a probability p of
at most that of all rounds together, on either of two neighbors, so that epsilon and
delta of runs without it become::

    delta <- delta + (1 + exp(epsilon)) p
"""

import numpy as np

from fedblend.checks import COUNT, gate
from fedblend.errors import UserError

OVERFLOW = 1e-18
"""The largest probability of a round to have a cohort that there is no room for."""


@gate(clients=COUNT, cohort=COUNT)
def largest_cohort(clients: int, cohort: int) -> int:
    """The number of clients that there has to be room for.

    Args:
        clients: n.
        cohort: K, clients of a round in the mean.
    """
    if cohort > clients:
        raise UserError("cohort", cohort, f"at most the {clients} clients there are")
    deviation = np.sqrt(cohort * (1 - cohort / clients))
    # Bernstein's inequality: a binomial is no further above its mean.
    most = min(clients, int(cohort + 10 * deviation + 30) + 1)
    sizes = np.arange(cohort, most + 1)
    return int(sizes[np.argmax(overflow(clients, cohort, sizes) <= OVERFLOW)])


def overflow(clients: int, cohort: int, room: np.ndarray) -> np.ndarray:
    """The probability that a cohort has more clients than there is room for.

    Args:
        clients: n.
        cohort: K, clients of a round in the mean.
        room: an array of numbers of clients.
    """
    from scipy.special import betainc

    short = np.maximum(clients - room, 1)
    tail = betainc(room + 1.0, short, cohort / clients)
    return np.where(room < clients, tail, 0.0)

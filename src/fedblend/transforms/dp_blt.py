# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""BLT-DP-FTRL: clipped updates, and noise that cancels over rounds, from a few buffers.

Wraps the algorithms that ``dp_fedavg`` wraps, if the server's step is linear. With K
the planned size of a cohort, z the noise, C the clip, and a strategy of decays and
weights (``theory.blt``), a round::

    delta_i <- delta_i * min(1, C / |delta_i|),  zeros if it is not finite
    w       <- N(0, (z C)^2) - sum over j of weights_j s_j
    s_j     <- decays_j s_j + w
    delta   <- (sum of the delta_i received + w) / K

and the wrapped server takes delta as the mean update. The noise in FedAvg's model, the
sum of all w so far, is less than that of independent noise at equal privacy, and less
than a tree's: the strategy is optimal for the number of rounds, for how many rounds lie
between two updates of a client, and for the server's momentum. Without buffers it
is ``dp_fedavg``. ``theory.privacy.blt_cost`` computes the cost, which depends on
how often clients take part and how far apart, whatever the strategy was made for.

The buffers stay in the memory of the process, see ``blt_noise``. A run that is resumed
begins with empty ones, which costs accuracy and no privacy. The text of ``dp_fedavg``
on dropouts, enrollment and client states holds here too.

Where this differs from the paper: the strategy minimizes the mean of the models'
variances over rounds. Clients are dealt out in a fixed order to keep them apart.

Reference: McMahan, Xu, Zhang, "A hassle-free algorithm for strong differential privacy
in federated learning systems", EMNLP 2024, arXiv:2408.08868.
"""

from functools import partial
from typing import Annotated

from fedblend import keys
from fedblend.checks import (
    Count,
    NotNegative,
    Positive,
    words,
)
from fedblend.core import Algorithm
from fedblend.registry import transform
from fedblend.theory.blt import STRATEGY, Blt
from fedblend.transforms._correlated_noise import noise_sums
from fedblend.transforms.blt_noise import add_blt_noise, first_buffers
from fedblend.transforms.noise import SOURCES


@transform()
def dp_blt(
    algorithm: Algorithm,
    *,
    clip: Positive,
    noise: NotNegative,
    cohort: Count,
    strategy: Annotated[Blt, STRATEGY],
    noise_from: Annotated[str, words(*SOURCES)] = "system",
) -> Algorithm:
    """The wrapped algorithm with clipped updates and noise that cancels over rounds.

    Args:
        algorithm: what to run; all transforms of what clients do go inside. Its
            server's step is linear: FedAvg's, or FedOpt's with SGD, momentum or not.
        clip: C, the largest l2 norm of an update.
        noise: z, the standard deviation of the noise that a round adds, in units of C.
        cohort: K, the number of clients of every round.
        strategy: of ``theory.blt.optimal``, for the rounds and the separation of the
            run.
        noise_from: "system" or "seed", as of ``dp_fedavg``.
    """
    from_seed = noise_from == "seed"

    def add(delta, state, round, counts, key):
        own = keys.named(keys.named(key, "privacy"), "sum") if from_seed else None
        std = noise * clip / cohort
        return add_blt_noise(
            delta,
            std,
            state,
            strategy=strategy,
            round=round,
            counts=counts,
            key=own,
        )

    return noise_sums(
        algorithm,
        "dp_blt",
        clip=clip,
        cohort=cohort,
        first=partial(first_buffers, strategy, from_seed=from_seed),
        add=add,
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Noise on sums over rounds: what ``dp_blt`` adds, and other such noise.

Clients clip, the server clips again what it decodes, and divides the sum of what it
received by the planned size of a cohort. The noise of a round depends on that of
earlier rounds, so that it cancels in part, if the server's step is linear.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from fedblend import trees
from fedblend.core import Algorithm, Key, PyTree
from fedblend.transforms._compose import is_linear
from fedblend.transforms.clip import clip as fixed_clip
from fedblend.transforms.clip import clip_decoded
from fedblend.transforms.dp_fedavg import delta_alone

Add = Callable[[PyTree, PyTree, jax.Array, jax.Array, Key], tuple[PyTree, PyTree]]
"""``add(delta, noise, round, counts, key)``: the noisy delta, and the next state."""


class NoisyServer(NamedTuple):
    """The server's state: the wrapped server's state, and that of the noise.

    Where the noise comes from the operating system, ``noise`` is a name for what the
    process keeps to itself.
    """

    inner: PyTree
    noise: PyTree


def noise_sums(
    algorithm: Algorithm,
    transform: str,
    *,
    clip: float,
    cohort: int,
    first: Callable[[PyTree], PyTree],
    add: Add,
) -> Algorithm:
    """The algorithm with clipped updates, whose mean has noise of a state.

    Args:
        algorithm: what to run.
        transform: the name of the transform, for what is refused.
        clip: the largest l2 norm of an update.
        cohort: the planned number of clients of every round.
        first: from the shared model to the first state of the noise.
        add: the noise of a round; its unit is that of the mean update.
    """
    if algorithm.needs.turns:
        raise ValueError(
            f"{transform}: the wrapped algorithm's server moves some parameters in "
            "some rounds only, so that noise would not cancel over rounds; use "
            "dp_fedavg"
        )
    inner = clip_decoded(fixed_clip(delta_alone(algorithm, transform), clip), clip)

    def start(params, joins, central, key):
        down, server = inner.start(params, joins, central, key)
        return down, NoisyServer(server, first(down.shared))

    def server(aggregate, down, server, central, key):
        mean = trees.scale(aggregate.count.astype(float) / cohort, aggregate.mean)
        counts = aggregate.count > 0
        delta, noise = add(mean.delta, server.noise, down.round, counts, key)

        def step(delta):
            noisy = aggregate._replace(mean=mean._replace(delta=delta))
            return inner.server(noisy, down, server.inner, central, key)

        if not is_linear(step, delta):
            # The noise of later rounds would not cancel that of earlier ones.
            raise ValueError(
                f"{transform}: the wrapped algorithm's server is not linear in the "
                "mean update, so that noise would not cancel over rounds; FedAvg's "
                "is, and FedOpt's with SGD and momentum"
            )
        after, state = step(delta)
        return after, NoisyServer(state, noise)

    return inner._replace(
        start=start,
        server=server,
        needs=inner.needs._replace(
            mean=True, uniform=True, weights="uniform", cohort=cohort, answers=True
        ),
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DP-FedAvg: clipped updates, and Gaussian noise on their sum.

Wraps an algorithm whose clients send ``delta_i`` and nothing else. With K the planned
size of a cohort, z the noise, C the clip, a round::

    delta_i <- delta_i * min(1, C / |delta_i|),  zeros if it is not finite
    delta   <- (sum of the delta_i received + N(0, (z C)^2)) / K

and the wrapped server takes delta as the mean update. Clients that drop out count as
zeros and the sum is still divided by K, so that the noise is the planned one. The
server clips again what it decodes: an encoding transform around this one may make
updates longer. Noise and cohorts come from the operating system, see ``noise``: who
knows the seed of a run can recompute neither.
``theory.privacy`` computes the cost in privacy; whatever the server or a user of its
model does afterwards costs nothing more. Client states are neither clipped nor noisy,
and are never sent. What clients would send at enrollment becomes zeros: FLIX starts at
the initial parameters instead of at an average of local models.

With a ``quantile`` C follows it, as in ``adaptive_clip``, on a noisy count; both kinds
of noise together are as private as z alone::

    b <- 1/2 + (sum of u_i received + N(0, s^2)) / K
    delta has noise z_d C,   z_d = (z^-2 - (2 s)^-2)^(-1/2)

Where this differs from the papers: the cohort has a fixed size, drawn without
replacement, while they include every client independently at random. Weights are
uniform. Clipping is of all parameters together. Clients that drop out count as 0, and
in b as 1/2.

Reference: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent
language models", ICLR 2018, arXiv:1710.06963; for the quantile Andrew, Thakkar,
McMahan, Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS
2021, arXiv:1905.03871.
"""

from typing import Annotated

import jax

from fedblend import keys, trees
from fedblend.checks import (
    FRACTION,
    NOT_NEGATIVE,
    Count,
    NotNegative,
    Positive,
    is_traced,
    optional,
    words,
)
from fedblend.core import Algorithm, Up
from fedblend.registry import transform
from fedblend.transforms._compose import check_length, delta_of
from fedblend.transforms.clip import adaptive_clip, clip_decoded
from fedblend.transforms.clip import clip as fixed_clip
from fedblend.transforms.noise import SOURCES, add_noise


@transform()
def dp_fedavg(
    algorithm: Algorithm,
    *,
    clip: Positive,
    noise: NotNegative,
    cohort: Count,
    quantile: Annotated[float | None, optional(FRACTION)] = None,
    rate: Positive = 0.2,
    count_noise: Annotated[float | None, optional(NOT_NEGATIVE)] = None,
    noise_from: Annotated[str, words(*SOURCES)] = "system",
) -> Algorithm:
    """The wrapped algorithm with clipped updates and noise on their sum.

    Args:
        algorithm: what to run; all transforms of what clients do go inside.
        clip: C, the largest l2 norm of an update; with a quantile, the initial one.
        noise: z, the standard deviation of the noise on the sum, in units of C.
        cohort: K, the number of clients of every round.
        quantile: the share of clients to stay within C, which follows it; C is fixed if
            None.
        rate: how fast C follows.
        count_noise: s, the standard deviation of the noise on the count of clients
            within C; more than half of ``noise``. By default that of the paper, a
            twentieth of the cohort.
        noise_from: "system" draws noise and cohorts from the operating system, new in
            every run; "seed" draws both from the run's key, for research: the same
            again with the same seed, and no protection from who knows the seed.
    """
    plain = delta_alone(algorithm, "dp_fedavg")
    if quantile is None:
        counted, spread = 0.0, noise
        inner = clip_decoded(fixed_clip(plain, clip), clip)
    else:
        usual = cohort / 20 if noise else 0.0
        counted = usual if count_noise is None else count_noise
        spread = split_noise(noise, counted)
        inner = adaptive_clip(plain, clip, quantile=quantile, rate=rate)

    def server(aggregate, down, server, central, key):
        bound = clip if quantile is None else down.extra["adaptive_clip"]
        mean = trees.scale(aggregate.count.astype(float) / cohort, aggregate.mean)

        def noisy(tree, std, purpose):
            own = keys.named(keys.named(key, "privacy"), purpose)
            return add_noise(tree, std, own if noise_from == "seed" else None)

        delta = noisy(mean.delta, spread * bound / cohort, "sum")
        mean = mean._replace(delta=delta)
        if quantile is not None:
            mean = mean._replace(extra=noisy(mean.extra, counted / cohort, "count"))
        return inner.server(aggregate._replace(mean=mean), down, server, central, key)

    return inner._replace(
        server=server,
        needs=inner.needs._replace(
            mean=True,
            uniform=True,
            weights="uniform",
            cohort=cohort,
            secret_cohorts=noise_from == "system" and (is_traced(noise) or noise > 0),
        ),
    )


def split_noise(noise: float, count_noise: float) -> float:
    """z_d: the noise of the sum with which sum and count together are as private as z.

    Args:
        noise: z, of both together.
        count_noise: s, of the count.
    """
    if noise == 0:
        return 0.0
    if not 2 * count_noise > noise:
        raise ValueError(
            f"dp_fedavg: count_noise: {count_noise:g} is not above half of the noise "
            f"{noise:g}, so that no noise on the sum is enough; use a larger cohort or "
            "count_noise"
        )
    return (noise**-2 - (2 * count_noise) ** -2) ** -0.5


def delta_alone(algorithm: Algorithm, transform: str) -> Algorithm:
    """The algorithm, whose clients send a finite delta and nothing else.

    An update that is not finite becomes zeros: the server, which leaves such updates
    out, must not learn whose it was.
    """
    check_length(algorithm, transform)

    def enroll(params, shard, key):
        join, client = algorithm.enroll(params, shard, key)
        return trees.zeros_like(join), client

    def client(down, client, shard, key):
        up, after = algorithm.client(down, client, shard, key)
        delta = delta_of(up, transform)
        if jax.tree.leaves(up.extra):
            raise ValueError(
                f"{transform}: clients of the wrapped algorithm send more than an "
                "update of the model, and the noise would not cover it"
            )
        usable = trees.is_finite(delta)
        delta = trees.select(usable, delta, trees.zeros_like(delta))
        return Up(delta, extra=up.extra), trees.select(usable, after, client)

    return algorithm._replace(enroll=enroll, client=client)

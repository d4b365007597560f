# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DP-FedAvg: clipped answers, and Gaussian noise on their sum.

Wraps an algorithm whose clients say ``delta_i`` and nothing else. With K the planned
size of a cohort, z the noise, C the clip, a round::

    delta_i <- delta_i * min(1, C / |delta_i|),  zeros if it is not finite
    delta   <- (sum of the delta_i heard + N(0, (z C)^2)) / K

and the wrapped server takes delta for the mean. The sum is over K also where clients
drop out, who count like zeros: the noise is what was planned. Whatever the server, and
whoever uses its model, does afterwards costs no privacy; ``theory.privacy`` has what it
does cost. What a client keeps for itself is not covered, and never travels. What
clients would say on joining is replaced by zeros: FLIX starts at the initial
parameters instead of at an average of local models.

With a ``quantile`` C follows it, as in ``clipped_by_quantile``, on a noisy count; both
kinds of noise together are as private as z alone::

    b <- 1/2 + (sum of u_i heard + N(0, s^2)) / K
    delta has noise z_d C,   z_d = (z^-2 - (2 s)^-2)^(-1/2)

Where this differs from the papers: the cohort has a fixed size, drawn without
replacement, while they choose every client by a coin of its own. Weights are uniform.
Clipping is of all parameters together. Clients not heard count like 0, and in b like
1/2.

Reference: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent
language models", ICLR 2018, arXiv:1710.06963; for the quantile Andrew, Thakkar,
McMahan, Ramaswamy, "Differentially private learning with adaptive clipping", NeurIPS
2021, arXiv:1905.03871.
"""

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.checks import (
    ALGORITHM,
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    gate,
    optional,
)
from fedblend.core import Algorithm, Key, PyTree, Up
from fedblend.transforms.clip import adaptive_clip
from fedblend.transforms.clip import clip as clipped
from fedblend.transforms.compose import check_length, delta_of


@gate(
    algorithm=ALGORITHM,
    clip=POSITIVE,
    noise=NOT_NEGATIVE,
    cohort=COUNT,
    quantile=optional(FRACTION),
    rate=POSITIVE,
    count_noise=optional(NOT_NEGATIVE),
)
def dp_fedavg(
    algorithm: Algorithm,
    *,
    clip: float,
    noise: float,
    cohort: int,
    quantile: float | None = None,
    rate: float = 0.2,
    count_noise: float | None = None,
) -> Algorithm:
    """The wrapped algorithm with clipped answers and noise on their sum.

    Args:
        algorithm: what to run; all that clients do stands inside.
        clip: C, the largest l2 norm of an answer; with a quantile, at first.
        noise: z, the standard deviation of the noise on the sum, in units of C.
        cohort: K, clients of a round; the runtime refuses another number.
        quantile: the share of clients to stay within C, which follows; fixed if None.
        rate: how fast C follows.
        count_noise: s, of the count of clients within C; a twentieth of the cohort if
            None. More than half of ``noise``.
    """
    if quantile is None:
        counted, spread = 0.0, noise
        inner = clipped(delta_alone(algorithm), clip)
    else:
        counted = _count_noise(noise, cohort) if count_noise is None else count_noise
        spread = shared_noise(noise, counted)
        inner = adaptive_clip(
            delta_alone(algorithm), clip, quantile=quantile, rate=rate
        )

    def server(aggregate, down, server, central, key):
        bound = clip if quantile is None else down.extra[1]
        mean = trees.scale(aggregate.count.astype(float) / cohort, aggregate.mean)
        own = keys.named(key, "privacy")
        delta = noisy(mean.delta, spread * bound / cohort, keys.named(own, "sum"))
        mean = mean._replace(delta=delta)
        if quantile is not None:
            count = noisy(mean.extra, counted / cohort, keys.named(own, "count"))
            mean = mean._replace(extra=count)
        return inner.server(aggregate._replace(mean=mean), down, server, central, key)

    return inner._replace(
        server=server,
        needs=inner.needs._replace(
            mean=True, uniform=True, weights="uniform", cohort=cohort
        ),
    )


def _count_noise(noise: float, cohort: int) -> float:
    """The paper's choice, a twentieth of the cohort, where there is noise at all."""
    return cohort / 20 if noise else 0.0


def shared_noise(noise: float, count_noise: float) -> float:
    """z_d: the noise left for the sum, if sum and count are to cost as much as z.

    Args:
        noise: z, of both together.
        count_noise: s, of the count.
    """
    if noise == 0:
        return 0.0
    if not 2 * count_noise > noise:
        raise ValueError(
            f"private: count_noise: {count_noise:g} is not above half of the noise "
            f"{noise:g}, so that none would be enough for the sum; a larger cohort or "
            "count_noise helps"
        )
    return (noise**-2 - (2 * count_noise) ** -2) ** -0.5


def delta_alone(algorithm: Algorithm) -> Algorithm:
    """The algorithm, whose clients say a finite delta and nothing that noise misses.

    That an answer is not finite must not show in who is heard.
    """
    check_length(algorithm, "private")

    def enroll(params, shard, key):
        join, client = algorithm.enroll(params, shard, key)
        return trees.zeros_like(join), client

    def client(down, client, shard, key):
        up, after = algorithm.client(down, client, shard, key)
        delta = delta_of(up, "private")
        if jax.tree.leaves(up.extra):
            raise ValueError(
                "private: the wrapped algorithm's clients say more than a step of the "
                "model, and the noise would not cover it"
            )
        usable = trees.is_finite(delta)
        delta = trees.select(usable, delta, trees.zeros_like(delta))
        return Up(delta, extra=up.extra), trees.select(usable, after, client)

    return algorithm._replace(enroll=enroll, client=client)


def noisy(tree: PyTree, std: float | jax.Array, key: Key) -> PyTree:
    """The tree with independent Gaussian noise on every entry."""
    leaves, structure = jax.tree.flatten(tree)
    noisy = [
        leaf
        + jnp.asarray(std, leaf.dtype) * jax.random.normal(own, leaf.shape, leaf.dtype)
        for leaf, own in zip(leaves, jax.random.split(key, len(leaves)), strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)

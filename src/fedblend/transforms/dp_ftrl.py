# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DP-FTRL: clipped updates, and noise on their sums over rounds, by a binary tree.

Wraps the algorithms that ``dp_fedavg`` wraps, if the server's step is linear. The
rounds of a tree are its leaves, s = 1, 2, .. With K the planned size of a cohort, z the
noise, C the clip::

    delta_i <- delta_i * min(1, C / |delta_i|),  zeros if it is not finite
    S_s     <- sum of all delta_i received in the tree's rounds 1 to s
    N_s     <- sum over the ones of s in binary: the noise of a node, N(0, (z C)^2)
    delta   <- ((S_s + N_s) - (S_(s-1) + N_(s-1))) / K

and the wrapped server takes delta as the mean update. The one at level l of s stands
for the node over the 2^l leaves up to the last multiple of 2^l. FedAvg's model is thus
``(S_s + N_s) / K`` away from the model at the root of the tree, and has noise of at
most log2(s) + 1 nodes, not of s rounds. With momentum at the server it is the paper's
DP-FTRLM. A client that takes part once in a tree is in no more nodes than the number of
rounds has binary digits; ``theory.privacy`` computes what that costs. After ``tree``
rounds a new tree begins where the last one ended: powers of two end with the noise of
one node.

Noise is drawn again from keys whenever a round uses it: the server's state is one seed,
which the first round draws from the server's key, since in a deployment nobody else may
know it. A round without any update changes nothing, and its noise is never canceled.
The text of ``dp_fedavg`` on dropouts, enrollment and client states holds here too.

Where this differs from the paper: there is no Honaker estimate from a tree's nodes, and
a tree that ends early is not completed. Noise is drawn for the nodes that sums use.

Reference: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep)
learning without sampling or shuffling", ICML 2021, arXiv:2103.00039; the tree is of
Dwork, Naor, Pitassi, Rothblum, STOC 2010, and Chan, Shi, Song, ICALP 2010.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.checks import ALGORITHM, COUNT, NOT_NEGATIVE, POSITIVE, gate
from fedblend.core import Algorithm, Key, PyTree
from fedblend.registry import transform
from fedblend.transforms.clip import clip as fixed_clip
from fedblend.transforms.compose import is_linear
from fedblend.transforms.dp_fedavg import add_noise, delta_alone


class TreeServer(NamedTuple):
    """The server's state: the wrapped server's state, and the seed of all trees."""

    inner: PyTree
    seed: jax.Array


@transform()
@gate(algorithm=ALGORITHM, clip=POSITIVE, noise=NOT_NEGATIVE, cohort=COUNT, tree=COUNT)
def dp_ftrl(
    algorithm: Algorithm, *, clip: float, noise: float, cohort: int, tree: int
) -> Algorithm:
    """The wrapped algorithm with clipped updates and tree noise on sums over rounds.

    For a guarantee no client may take part twice in a tree: ``simulate(epoch=...)``.

    Args:
        algorithm: what to run; all transforms of what clients do go inside. Its
            server's step is linear: FedAvg's, or FedOpt's with SGD, momentum or not.
        clip: C, the largest l2 norm of an update.
        noise: z, the standard deviation of the noise of a node, in units of C.
        cohort: K, the number of clients of every round.
        tree: rounds after which a new tree begins.
    """
    inner = fixed_clip(delta_alone(algorithm, "dp_ftrl"), clip)

    def start(params, joins, central, key):
        down, server = inner.start(params, joins, central, key)
        return down, TreeServer(server, jnp.zeros(2, jnp.uint32))

    def server(aggregate, down, server, central, key):
        drawn = jax.random.bits(keys.named(key, "tree"), (2,), jnp.uint32)
        seed = jnp.where(server.seed.any(), server.seed, drawn)
        number, place = jnp.divmod(down.round, tree)
        own = keys.at(
            jax.random.wrap_key_data(seed, impl="threefry2x32"), "tree", number
        )
        mean = trees.scale(aggregate.count.astype(float) / cohort, aggregate.mean)
        delta = _with_noise(mean.delta, noise * clip / cohort, own, place)

        def step(delta):
            noisy = aggregate._replace(mean=mean._replace(delta=delta))
            return inner.server(noisy, down, server.inner, central, key)

        if not is_linear(step, delta):
            # The noise of later rounds would not cancel that of earlier ones.
            raise ValueError(
                "dp_ftrl: the wrapped algorithm's server is not linear in the mean "
                "update, so that noise would not cancel over a tree; FedAvg's is, and "
                "FedOpt's with SGD and momentum"
            )
        after, state = step(delta)
        return after, TreeServer(state, seed)

    return inner._replace(
        start=start,
        server=server,
        needs=inner.needs._replace(
            mean=True, uniform=True, weights="uniform", cohort=cohort
        ),
    )


def _with_noise(delta: PyTree, std: float, own: Key, place: jax.Array) -> PyTree:
    """The delta plus ``N_s - N_(s-1)`` for s = place + 1, of nodes with this std.

    The lowest one of s, at some level, is a new node, which replaces all nodes below
    that level. Those above are in both sums.
    """
    step = place + 1
    top = jax.lax.population_count((step & -step) - 1)

    def add(level, total):
        leaf = jnp.where(level == top, step, place)
        sign = jnp.where(level == top, std, -std)
        return add_noise(total, sign, keys.at(own, "node", level, leaf >> level))

    return jax.lax.fori_loop(0, top + 1, add, delta)

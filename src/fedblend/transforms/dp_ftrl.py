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

The secrets of a sum's nodes stay in the memory of the process, see ``noise``; the
server's state has a name for them. A run that is resumed, which has a name that nobody
knows, begins a new tree there. A client that takes part once is then in nodes of the
piece before or of the piece after, never more than in the whole tree, so that this
costs accuracy and no privacy. A round without any update is no leaf. With noise from
the seed nodes are drawn again from keys whenever a round uses them, and the noise of a
round without any update is never canceled. The text of ``dp_fedavg`` on dropouts,
enrollment and client states holds here too.

Where this differs from the paper: there is no Honaker estimate from a tree's nodes, and
a tree that ends early is not completed; ``dp_blt`` is near the best that any estimate
could be. Noise is drawn for the nodes that sums use.

Reference: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep)
learning without sampling or shuffling", ICML 2021, arXiv:2103.00039; the tree is of
Dwork, Naor, Pitassi, Rothblum, STOC 2010, and Chan, Shi, Song, ICALP 2010.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import (
    Count,
    NotNegative,
    Positive,
    words,
)
from fedblend.core import Algorithm, PyTree
from fedblend.registry import transform
from fedblend.transforms._correlated_noise import noise_sums
from fedblend.transforms.noise import NO_NAME, SOURCES, add_noise, add_tree_noise


@transform()
def dp_ftrl(
    algorithm: Algorithm,
    *,
    clip: Positive,
    noise: NotNegative,
    cohort: Count,
    tree: Count,
    noise_from: Annotated[str, words(*SOURCES)] = "system",
) -> Algorithm:
    """The wrapped algorithm with clipped updates and tree noise on sums over rounds.

    For a guarantee no client may take part twice in a tree: ``Cohort(epoch=...)``.

    Args:
        algorithm: what to run; all transforms of what clients do go inside. Its
            server's step is linear: FedAvg's, or FedOpt's with SGD, momentum or not.
        clip: C, the largest l2 norm of an update.
        noise: z, the standard deviation of the noise of a node, in units of C.
        cohort: K, the number of clients of every round.
        tree: rounds after which a new tree begins.
        noise_from: "system" or "seed", as of ``dp_fedavg``.
    """
    std = noise * clip / cohort
    # The name of the nodes of the sum so far, or the seed of all trees.
    first = jnp.zeros(2, jnp.uint32) if noise_from == "seed" else jnp.asarray(NO_NAME)

    def add(delta, nodes, round, counts, key):
        number, place = jnp.divmod(round, tree)
        if noise_from == "seed":
            drawn = jax.random.bits(keys.named(key, "tree"), (2,), jnp.uint32)
            nodes = jnp.where(nodes.any(), nodes, drawn)  # the first round draws it
            return _add_seed_noise(delta, std, nodes, number, place), nodes
        return add_tree_noise(delta, std, nodes, number, counts)

    return noise_sums(
        algorithm,
        "dp_ftrl",
        clip=clip,
        cohort=cohort,
        first=lambda shared: first,
        add=add,
    )


def _add_seed_noise(
    delta: PyTree, std: float, seed: jax.Array, number: jax.Array, place: jax.Array
) -> PyTree:
    """The delta plus ``N_s - N_(s-1)`` for s = place + 1, of nodes with this std.

    The lowest one of s, at some level, is a new node, which replaces all nodes below
    that level. Those above are in both sums.
    """
    own = keys.at(jax.random.wrap_key_data(seed, impl="threefry2x32"), "tree", number)
    step = place + 1
    top = jax.lax.population_count((step & -step) - 1)

    def add(level, total):
        leaf = jnp.where(level == top, step, place)
        sign = jnp.where(level == top, std, -std)
        return add_noise(total, sign, keys.at(own, "node", level, leaf >> level))

    return jax.lax.fori_loop(0, top + 1, add, delta)

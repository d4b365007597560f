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

Noise comes from the seed: it is for measuring, and protects nobody from those who know
the seed. ``transforms.dp_blt`` has less noise at equal epsilon, also from the operating
system. Nodes are drawn again from keys whenever a round uses them, and the noise of a
round without any update is never canceled. The text of ``dp_fedavg`` on dropouts,
enrollment and client states holds here too.

Where this differs from the paper: there is no Honaker estimate from a tree's nodes, and
a tree that ends early is not completed; ``dp_blt`` is near the best that any estimate
could be. Noise is drawn for the nodes that sums use.

Reference: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep)
learning without sampling or shuffling", ICML 2021, arXiv:2103.00039; the tree is of
Dwork, Naor, Pitassi, Rothblum, STOC 2010, and Chan, Shi, Song, ICALP 2010.
"""

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.checks import (
    CHANCE,
    COUNT,
    NOT_NEGATIVE,
    WHOLE,
    Count,
    NotNegative,
    Positive,
    gate,
    optional,
    words,
)
from fedblend.core import Algorithm, PyTree
from fedblend.theory.privacy import MOVES, Guarantee, gaussian_epsilon
from fedblend.transforms._correlated_noise import noise_sums
from fedblend.transforms.noise import add_noise


@gate()
def dp_ftrl(
    algorithm: Algorithm,
    *,
    clip: Positive,
    noise: NotNegative,
    cohort: Count,
    tree: Count,
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
    """
    std = noise * clip / cohort
    first = jnp.zeros(2, jnp.uint32)

    def add(delta, seed, round, counts, key):
        del counts
        number, place = jnp.divmod(round, tree)
        drawn = jax.random.bits(keys.named(key, "tree"), (2,), jnp.uint32)
        seed = jnp.where(seed.any(), seed, drawn)  # the first round draws it
        return _add_seed_noise(delta, std, seed, number, place), seed

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
    own = keys.derive(
        jax.random.wrap_key_data(seed, impl="threefry2x32"), "tree", number
    )
    step = place + 1
    top = jax.lax.population_count((step & -step) - 1)

    def add(level, total):
        leaf = jnp.where(level == top, step, place)
        sign = jnp.where(level == top, std, -std)
        return add_noise(total, sign, keys.derive(own, "node", level, leaf >> level))

    return jax.lax.fori_loop(0, top + 1, add, delta)


@gate(
    noise=NOT_NEGATIVE,
    rounds=WHOLE,
    delta=CHANCE,
    tree=COUNT,
    epoch=optional(COUNT),
    runs=COUNT,
)
def tree_cost(
    *,
    noise: float,
    tree: int,
    epoch: int | None,
    rounds: int,
    delta: float,
    adjacency: str = "replace_one",
    runs: int = 1,
) -> Guarantee:
    """The privacy that rounds cost a client that takes part at most once in an epoch.

    No cohorts are sampled, their size does not matter.

    Args:
        noise: z, of a node in units of the clip.
        tree: rounds of a tree of ``dp_ftrl``; 1 for ``transforms.dp_fedavg``.
        epoch: as in ``simulate``; None if cohorts are drawn anew in every round.
        rounds: of the whole run, whichever of them are published.
        delta: the probability of failure; far below 1/n.
        adjacency: "replace_one" or "zero_out".
        runs: number of runs of all rounds, with other seeds.
    """
    words("replace_one", "zero_out")("adjacency", adjacency)
    if noise > 0 and (epoch or 1) % tree:
        drawn = (
            f"drawn in epochs of {epoch} rounds" if epoch else "drawn in every round"
        )
        reason = (
            f"clients are {drawn}, and one may take part more than once in a tree of "
            f"{tree}; epochs of {tree} or a multiple are needed"
        )
        return Guarantee(None, delta, adjacency, reason)
    # In a tree of T rounds the first leaf is below a node of every size up to T: 1, 2,
    # 4, .., as many as T has binary digits.
    whole, rest = divmod(rounds, epoch or 1)
    nodes = whole * tree.bit_length() + min(rest, tree).bit_length()
    if noise == 0:
        return Guarantee(None, delta, adjacency, "there is no noise")
    moved = runs * nodes * (MOVES[adjacency] / noise) ** 2
    return Guarantee(gaussian_epsilon(moved, delta), delta, adjacency)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clipped answers: no client moves the shared model further than a bound.

Wraps an algorithm whose clients say ``delta_i``::

    delta_i <- delta_i * min(1, C / |delta_i|)       |.| over all that travels

``clipped`` has a fixed bound C. ``clipped_by_quantile`` follows a quantile of the
clients' norms; the server says C, and a client also says on which side it was::

    u_i <- 1/2 if |delta_i| <= C, before clipping, else -1/2           travels
    b   <- 1/2 + mean u_i                    the share of clients within C
    C   <- C exp(-rate (b - quantile))

What clients keep (FLIX's local model, APFL's, SCAFFOLD's control) is as it was, and so
is what else they say. Encoding transforms go outside. To clip gradients instead, local
or at the server, put ``optax.clip_by_global_norm`` before the optimizer.

Where this differs from the paper: nothing is noisy here, ``private`` adds that. The
paper says 0 and 1, and takes off 1/2 in its analysis only. With other weights than
uniform b is the share of weight.

Reference: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with
adaptive clipping", NeurIPS 2021, arXiv:1905.03871.
"""

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.checks import ALGORITHM, FRACTION, POSITIVE, gate
from fedblend.core import Algorithm, Down, PyTree, Up
from fedblend.transforms.compose import check_length, delta_of


@gate(algorithm=ALGORITHM, norm=POSITIVE)
def clip(algorithm: Algorithm, norm: float) -> Algorithm:
    """The wrapped algorithm with answers no longer than a bound.

    Args:
        algorithm: what to run; encoding transforms go around this one.
        norm: C, the largest l2 norm of a client's ``delta``.
    """
    check_length(algorithm, "clipped")

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        delta, _ = clip_tree(delta_of(up, "clipped"), norm)
        return Up(delta, up.mean_gradient, up.extra), client

    return algorithm._replace(client=client)


@gate(algorithm=ALGORITHM, norm=POSITIVE, quantile=FRACTION, rate=POSITIVE)
def adaptive_clip(
    algorithm: Algorithm, norm: float, *, quantile: float = 0.5, rate: float = 0.2
) -> Algorithm:
    """The wrapped algorithm with answers clipped at a quantile of their own norms.

    Args:
        algorithm: what to run; encoding transforms go around this one.
        norm: C at first.
        quantile: the share of clients whose answers are to stay as they are.
        rate: how fast C follows.
    """
    check_length(algorithm, "clipped")

    def inside(down: Down) -> Down:
        return down._replace(extra=down.extra[0])

    def start(params, joins, central, key):
        down, server = algorithm.start(params, joins, central, key)
        return down._replace(extra=(down.extra, jnp.asarray(norm, float))), server

    def client(down, client, shard, key):
        up, client = algorithm.client(inside(down), client, shard, key)
        bound = down.extra[1]
        delta, before = clip_tree(delta_of(up, "clipped"), bound)
        side = jnp.where(before <= bound, 0.5, -0.5).astype(bound.dtype)
        return Up(delta, up.mean_gradient, (up.extra, side)), client

    def undo(up):
        extra, side = up.extra
        up = algorithm.decode(up._replace(extra=extra))
        return up._replace(extra=(up.extra, side))

    def server(aggregate, down, server, central, key):
        extra, side = aggregate.mean.extra
        aggregate = aggregate._replace(mean=aggregate.mean._replace(extra=extra))
        after, server = algorithm.server(aggregate, inside(down), server, central, key)
        bound = down.extra[1] * jnp.exp(-rate * (0.5 + side - quantile))
        return after._replace(extra=(after.extra, bound)), server

    def tell(down, request):
        told = algorithm.tell(inside(down), request)
        return told._replace(extra=(told.extra, down.extra[1]))

    return algorithm._replace(
        start=start,
        client=client,
        server=server,
        personal=lambda down, client, shard, key: algorithm.personal(
            inside(down), client, shard, key
        ),
        tell=tell,
        decode=undo,
        needs=algorithm.needs._replace(mean=True),
    )


def clip_tree(tree: PyTree, bound: float | jax.Array) -> tuple[PyTree, jax.Array]:
    """The tree, shortened to the bound where it is longer, and its norm before.

    The norm is taken in float32 at least; the bound is kept up to rounding.
    """
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree
    )
    norm = jnp.sqrt(trees.squared_norm(wide))
    return trees.scale(jnp.minimum(1, bound / norm), tree), norm

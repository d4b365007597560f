# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clipped updates: no client moves the shared model further than a bound.

Wraps an algorithm whose clients send ``delta_i``::

    delta_i <- delta_i * min(1, C / |delta_i|)       |.| over all parameters sent

``clip`` has a fixed bound C. With ``adaptive_clip`` C follows a quantile of the
clients' norms: the server sends C, and a client also sends on which side its norm was::

    u_i <- 1/2 if |delta_i| <= C, before clipping, else -1/2           sent
    b   <- 1/2 + mean u_i                    the share of clients within C
    C   <- C exp(-rate (b - quantile))

Client states (FLIX's local model, APFL's, SCAFFOLD's control) and ``up.extra`` are not
clipped. Encoding transforms go outside. To clip gradients instead, at clients or at the
server, put ``optax.clip_by_global_norm`` before the optimizer.

Where this differs from the paper: there is no noise, which ``dp_fedavg`` adds. The
paper sends 0 and 1, and subtracts 1/2 in its analysis only. With weights other than
uniform, b is the share of weight.

Reference: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with
adaptive clipping", NeurIPS 2021, arXiv:1905.03871.
"""

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.checks import Fraction, Positive
from fedblend.core import Algorithm, PyTree, Up
from fedblend.registry import transform
from fedblend.transforms._compose import (
    check_length,
    delta_of,
)


@transform()
def clip(algorithm: Algorithm, norm: Positive) -> Algorithm:
    """The wrapped algorithm with updates clipped at a fixed norm.

    Args:
        algorithm: what to run; encoding transforms go around this one.
        norm: C, the largest l2 norm of a client's ``delta``.
    """
    check_length(algorithm, "clip")

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        delta, _ = clip_tree(delta_of(up, "clip"), norm)
        return Up(delta, up.mean_gradient, up.extra), client

    return algorithm._replace(client=client)


@transform()
def adaptive_clip(
    algorithm: Algorithm,
    norm: Positive,
    *,
    quantile: Fraction = 0.5,
    rate: Positive = 0.2,
) -> Algorithm:
    """The wrapped algorithm with updates clipped at a quantile of their norms.

    Args:
        algorithm: what to run; encoding transforms go around this one.
        norm: the initial C.
        quantile: the share of clients whose updates are to stay unclipped.
        rate: how fast C follows.
    """
    check_length(algorithm, "adaptive_clip")

    def send_bound(down, bound):
        return down._replace(extra=down.extra | {"adaptive_clip": bound})

    def start(params, joins, central, key):
        down, server = algorithm.start(params, joins, central, key)
        return send_bound(down, jnp.asarray(norm, float)), server

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        bound = down.extra["adaptive_clip"]
        delta, before = clip_tree(delta_of(up, "adaptive_clip"), bound)
        side = jnp.where(before <= bound, 0.5, -0.5).astype(bound.dtype)
        extra = up.extra | {"adaptive_clip": side}
        return Up(delta, up.mean_gradient, extra), client

    def server(aggregate, down, server, central, key):
        share = 0.5 + aggregate.mean.extra["adaptive_clip"]
        bound = down.extra["adaptive_clip"] * jnp.exp(-rate * (share - quantile))
        after, server = algorithm.server(aggregate, down, server, central, key)
        return send_bound(after, bound), server

    return algorithm._replace(
        start=start,
        client=client,
        server=server,
        needs=algorithm.needs._replace(mean=True),
    )


def clip_decoded(algorithm: Algorithm, norm: float) -> Algorithm:
    """The algorithm, whose server clips what it decodes, whatever clients sent."""

    def decode(up, sender):
        up = algorithm.wire.decode(up, sender)
        return up._replace(delta=clip_tree(up.delta, norm)[0])

    return algorithm._replace(wire=algorithm.wire._replace(decode=decode))


def clip_tree(tree: PyTree, bound: float | jax.Array) -> tuple[PyTree, jax.Array]:
    """The tree scaled down to the bound where its norm is larger, and that norm.

    The norm is computed in float32 at least; the bound holds up to rounding.
    """
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree
    )
    norm = jnp.sqrt(trees.sum_squares(wide))
    return trees.scale(jnp.minimum(1, bound / norm), tree), norm

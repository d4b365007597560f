# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Perm-k updates: together the clients send every entry once.

Wraps an algorithm. The server sends a common seed with every message, from which all n
clients draw the same permutation of the entries; client i sends the i-th block of its
update, one n-th of the entries, scaled by n::

    delta_i <- the wrapped algorithm's update at client i
    delta   <- mean of n * (block i of delta_i)

Clients with equal updates are averaged without any error, and the variance grows with
how much updates differ. All clients must take part, with equal weights. A client sends
the values of its block and nothing else: the server knows the seed and the client's id.

Where this differs from the paper: it compresses updates, ``-rate * gradient``, and
where n does not divide the number of entries, zeros fill the vector up.

Reference: Szlendak, Tyurin, Richtárik, "Permutation compressors for provably faster
distributed nonconvex optimization", ICLR 2022, arXiv:2110.03300.
"""

import jax

from fedblend import compress, keys
from fedblend.checks import ALGORITHM, COUNT, gate
from fedblend.compress.compressor import decode, encode
from fedblend.core import Algorithm, Down, Quotable, Quote
from fedblend.registry import transform
from fedblend.transforms.wrapping import (
    delta_of,
    inner_message,
    needs_with,
    with_inner_message,
)

PURPOSE = "permuted"
"""Of the random keys; another word would draw other permutations."""


@transform(encodes=True)
@gate(algorithm=ALGORITHM, clients=COUNT)
def perm_k(algorithm: Algorithm, *, clients: int) -> Algorithm:
    """The wrapped algorithm with perm-k updates.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        clients: the number of clients, all of whom take part in every round.
    """

    def compressor(seed: Quotable | Quote):
        return compress.perm_k(clients)(jax.random.wrap_key_data(seed.value))

    def seeded(down: Down, key) -> Down:
        seed = jax.random.key_data(keys.named(key, PURPOSE))
        return down._replace(extra=(down.extra, Quotable(seed, PURPOSE)))

    def start(params, joins, central, key):
        down, server = algorithm.start(params, joins, central, key)
        return seeded(down, key), server

    def client(down, client, shard, key):
        up, client = algorithm.client(inner_message(down), client, shard, key)
        seed, delta = down.extra[1], delta_of(up, "perm_k")
        encoded = encode(compressor(seed), delta, key, shard, PURPOSE)
        extra = (up.extra, Quote(seed.value, seed.name))
        return up._replace(delta=encoded, extra=extra), client

    def server(aggregate, down, server, central, key):
        down, server = algorithm.server(
            aggregate, inner_message(down), server, central, key
        )
        return seeded(down, key), server

    def undo(up):
        extra, seed = up.extra
        delta = decode(compressor(seed), up.delta)
        return algorithm.decode(up._replace(delta=delta, extra=extra))

    return with_inner_message(algorithm)._replace(
        start=start,
        client=client,
        server=server,
        decode=undo,
        needs=needs_with(clients, algorithm, "perm_k"),
    )

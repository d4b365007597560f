# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Permuted messages: together the clients send every entry once.

Wraps an algorithm. The server says a common seed with every message, from which all n
clients draw the same permutation of the entries; client i sends the i-th n-th of what
it would say, scaled by n::

    delta_i <- the wrapped algorithm's step at client i
    heard   <- mean of n * (block i of delta_i)

Clients that agree are averaged without any error, and the noise grows with how much
they differ only. Everyone must take part, with equal weights. The values of the block
are all that a client says: the server knows the seed that it gave, and whom it hears.

Where this differs from the paper: it compresses steps, ``-rate * gradient``, and where
n does not divide the number of entries some more zeros are permuted with them.

Reference: Szlendak, Tyurin, Richtárik, "Permutation compressors for provably faster
distributed nonconvex optimization", ICLR 2022, arXiv:2110.03300.
"""

import jax

from fedblend import keys
from fedblend.checks import ALGORITHM, COUNT, gate
from fedblend.compress.compressor import decode, encode
from fedblend.compress.sparse import perm_k
from fedblend.core import Algorithm, Down, Quotable, Quote
from fedblend.transforms.compose import delta_of, needs_with


@gate(algorithm=ALGORITHM, clients=COUNT)
def perm_k_compressed(algorithm: Algorithm, *, clients: int) -> Algorithm:
    """The wrapped algorithm with perm-k answers.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        clients: how many there are; the runtime refuses another number.
    """

    def compressor(seed: Quotable | Quote):
        return perm_k(clients)(jax.random.wrap_key_data(seed.value))

    def seeded(down: Down, key) -> Down:
        seed = jax.random.key_data(keys.named(key, "permuted"))
        return down._replace(extra=(down.extra, Quotable(seed, "permuted")))

    def inside(down: Down) -> Down:
        return down._replace(extra=down.extra[0])

    def start(params, joins, central, key):
        down, server = algorithm.start(params, joins, central, key)
        return seeded(down, key), server

    def client(down, client, shard, key):
        up, client = algorithm.client(inside(down), client, shard, key)
        seed, delta = down.extra[1], delta_of(up, "permuted")
        encoded = encode(compressor(seed), delta, key, shard, "permuted")
        extra = (up.extra, Quote(seed.value, seed.name))
        return up._replace(delta=encoded, extra=extra), client

    def server(aggregate, down, server, central, key):
        down, server = algorithm.server(aggregate, inside(down), server, central, key)
        return seeded(down, key), server

    def tell(down, request):
        told = algorithm.tell(inside(down), request)
        return told._replace(extra=(told.extra, down.extra[1]))

    def undo(up):
        extra, seed = up.extra
        delta = decode(compressor(seed), up.delta)
        return algorithm.decode(up._replace(delta=delta, extra=extra))

    return algorithm._replace(
        start=start,
        client=client,
        server=server,
        personal=lambda down, client, shard, key: algorithm.personal(
            inside(down), client, shard, key
        ),
        tell=tell,
        decode=undo,
        needs=needs_with(clients, algorithm, "permuted"),
    )

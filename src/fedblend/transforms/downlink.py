# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressed broadcasts (EF21-P): the server says only how its model has moved.

Wraps an algorithm whose server says ``shared``, x below; every client keeps a copy w of
what it knows of it, and the server too. A round::

    c <- C(x - w)                travels to every client
    w <- w + c                   on both sides: the model that clients train from
    x <- x + mean delta_i(w)     the wrapped server's step, from its own x

``down.shared`` is w, the model as clients know it; x is in the server's state. With the
identity as compressor it is the wrapped run to rounding. Everyone must take part, or
the copies would part. An encoding transform may stand inside.

Where this differs from the paper: w starts at the initial parameters, which clients
have; what the wrapped server says first reaches them compressed.

Reference: Gruntkowska, Tyurin, Richtárik, "EF21-P and friends: improved theoretical
communication complexity for distributed optimization with bidirectional compression",
ICML 2023, arXiv:2209.15218.
"""

from typing import NamedTuple

from fedblend import trees
from fedblend.checks import ALGORITHM, gate
from fedblend.compress.compressor import COMPRESSOR, Compressor, decode, encode
from fedblend.core import Algorithm, Down, PyTree


class DownlinkClient(NamedTuple):
    """What a client remembers: the wrapped algorithm's state, and w."""

    inner: PyTree
    known: PyTree


class DownlinkServer(NamedTuple):
    """What the server remembers: the wrapped algorithm's state, and x."""

    inner: PyTree
    shared: PyTree


@gate(algorithm=ALGORITHM, compressor=COMPRESSOR)
def downlink(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """The wrapped algorithm with compressed broadcasts.

    Args:
        algorithm: what to run.
        compressor: contractive, of what clients do not know yet; the same for all.
    """
    if compressor.delta is None:
        raise ValueError(f"downlink: {compressor.name} does not contract")

    def news(down: Down, known: PyTree, key) -> Down:
        """The wrapped server's word, as it is kept: w, and what leads there."""
        change = trees.subtract(down.shared, known)
        encoded = encode(compressor, change, key, None, "downlink")
        after = trees.add(known, decode(compressor, encoded))
        return down._replace(shared=after, extra=(down.extra, encoded))

    def enroll(params, shard, key):
        join, inner = algorithm.enroll(params, shard, key)
        return join, DownlinkClient(inner, params)

    def start(params, joins, central, key):
        down, inner = algorithm.start(params, joins, central, key)
        return news(down, params, key), DownlinkServer(inner, down.shared)

    def tell(down, request):
        extra, encoded = down.extra
        told = algorithm.tell(down._replace(extra=extra), request)
        return told._replace(shared=encoded)

    def learn(down, client) -> Down:
        known = trees.add(client.known, decode(compressor, down.shared))
        return down._replace(shared=known)

    def client(down, client, shard, key):
        down = learn(down, client)
        up, inner = algorithm.client(down, client.inner, shard, key)
        return up, DownlinkClient(inner, down.shared)

    def server(aggregate, down, server, central, key):
        known, (extra, _) = down.shared, down.extra
        down = down._replace(shared=server.shared, extra=extra)
        down, inner = algorithm.server(aggregate, down, server.inner, central, key)
        return news(down, known, key), DownlinkServer(inner, down.shared)

    return algorithm._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        personal=lambda down, client, shard, key: algorithm.personal(
            learn(down, client), client.inner, shard, key
        ),
        ask=lambda client, shard: algorithm.ask(client.inner, shard),
        info=lambda client: algorithm.info(client.inner),
        tell=tell,
        needs=algorithm.needs._replace(everyone=True, mean=True),
    )

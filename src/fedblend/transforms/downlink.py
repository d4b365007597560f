# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressed broadcasts (EF21-P): the server sends the change of its model, compressed.

Wraps an algorithm whose server sends ``shared``, x below; the server and every client
have the same copy w of it. A round::

    c <- C(x - w)                sent to every client
    w <- w + c                   on both sides: the model that clients train from
    x <- x + mean delta_i(w)     the wrapped server's step, from its own x

``down.shared`` is w, the clients' copy; x is in the server's state. With the identity
as compressor it is the wrapped run to rounding. All clients must take part, or the
copies would differ. The wrapped algorithm may encode its updates.

Where this differs from the paper: w starts at the initial parameters, which clients
have; the wrapped server's first model reaches them compressed.

Reference: Gruntkowska, Tyurin, Richtárik, "EF21-P and friends: improved theoretical
communication complexity for distributed optimization with bidirectional compression",
ICML 2023, arXiv:2209.15218.
"""

from typing import NamedTuple

from fedblend import trees
from fedblend.compress.compressor import Compressor, decode, encode
from fedblend.core import Algorithm, Down, PyTree
from fedblend.registry import transform
from fedblend.transforms._compose import warn_of_feedback, wrap_inner_state


class DownlinkClient(NamedTuple):
    """A client's state: the wrapped algorithm's state, and w."""

    inner: PyTree
    known: PyTree


class DownlinkServer(NamedTuple):
    """The server's state: the wrapped algorithm's state, and x."""

    inner: PyTree
    shared: PyTree


@transform()
def downlink(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """The wrapped algorithm with compressed broadcasts.

    Args:
        algorithm: what to run.
        compressor: contractive compressor of the model's change, one for all clients.
    """
    if compressor.delta is None:
        raise ValueError(f"downlink: {compressor.name} does not contract")
    warn_of_feedback(algorithm.needs.exact, compressor.name, "downlink")

    def broadcast(down: Down, known: PyTree, key) -> Down:
        """The wrapped server's message with w as the model, and c."""
        change = trees.subtract(down.shared, known)
        encoded = encode(compressor, change, key, None, "downlink")
        after = trees.add(known, decode(compressor, encoded))
        return down._replace(shared=after, extra=down.extra | {"downlink": encoded})

    def enroll(params, shard, key):
        join, inner = algorithm.enroll(params, shard, key)
        return join, DownlinkClient(inner, params)

    def start(params, joins, central, key):
        down, inner = algorithm.start(params, joins, central, key)
        return broadcast(down, params, key), DownlinkServer(inner, down.shared)

    def tell(down, request):
        message = algorithm.wire.tell(down, request)
        extra = dict(message.extra)
        return message._replace(shared=extra.pop("downlink"), extra=extra)

    def follow(down, client) -> Down:
        """The message with the client's new copy of the model."""
        known = trees.add(client.known, decode(compressor, down.shared))
        return down._replace(shared=known)

    def client(down, client, shard, key):
        down = follow(down, client)
        up, inner = algorithm.client(down, client.inner, shard, key)
        return up, DownlinkClient(inner, down.shared)

    def server(aggregate, down, server, central, key):
        known, down = down.shared, down._replace(shared=server.shared)
        down, inner = algorithm.server(aggregate, down, server.inner, central, key)
        return broadcast(down, known, key), DownlinkServer(inner, down.shared)

    inner = wrap_inner_state(algorithm)
    return inner._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        personal=lambda down, client, shard, key: algorithm.personal(
            follow(down, client), client.inner, shard, key
        ),
        wire=inner.wire._replace(tell=tell),
        needs=algorithm.needs._replace(everyone=True, mean=True),
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""EF21: error feedback, which makes biased compressors such as top-k converge.

Wraps an algorithm whose clients say ``delta_i``; each client keeps an estimate g_i of
what it would say, the server their weighted mean g. A round::

    c_i  <- C(delta_i - g_i)             travels
    g_i  <- g_i + c_i
    g    <- g + p * mean c_i         p = received weight / all weight
    mean <- g                            what the wrapped server hears

With the identity as compressor and everyone taking part it is the wrapped run.

Where this differs from the paper: estimates are kept in units of the step, ``-rate *
gradient``. They start at zero, so that after the first round g_i = C(delta_i), which is
the paper's own start. Clients that do not take part keep their estimate, and the server
steps along the mean of all.

Reference: Richtárik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically better,
and practically faster error feedback", NeurIPS 2021, arXiv:2106.05203.
"""

from typing import NamedTuple

import numpy as np

from fedblend import trees
from fedblend.checks import ALGORITHM, gate
from fedblend.compress.compressor import COMPRESSOR, Compressor, decode, encode
from fedblend.core import Algorithm, PyTree
from fedblend.transforms.compose import delta_of, through


class Ef21Client(NamedTuple):
    """What a client remembers: the wrapped algorithm's state, and g_i."""

    inner: PyTree
    estimate: PyTree


class Ef21Server(NamedTuple):
    """What the server remembers: the wrapped algorithm's state, and g."""

    inner: PyTree
    estimate: PyTree


@gate(algorithm=ALGORITHM, compressor=COMPRESSOR)
def ef21(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """The wrapped algorithm with compressed corrections to an estimate.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: contractive, of every client's correction.
    """
    delta = compressor.delta
    if delta is None:
        raise ValueError(f"ef21: {compressor.name} does not contract; diana takes it")

    def enroll(params, shard, key):
        dim = trees.size(params)
        if not np.min(delta(dim)) > 0:
            raise ValueError(f"ef21: {compressor.name} does not contract {dim} entries")
        join, inner = algorithm.enroll(params, shard, key)
        return join, Ef21Client(inner, trees.zeros_like(params))

    def start(params, joins, central, key):
        down, inner = algorithm.start(params, joins, central, key)
        return down, Ef21Server(inner, trees.zeros_like(params))

    def client(down, client, shard, key):
        up, inner = algorithm.client(down, client.inner, shard, key)
        said = delta_of(up, "ef21")
        change = trees.subtract(said, trees.where_given(said, client.estimate))
        encoded = encode(compressor, change, key, shard, "ef21")
        taken = decode(compressor, encoded)
        estimate = trees.add_where_given(client.estimate, taken)
        return up._replace(delta=encoded), Ef21Client(inner, estimate)

    def undo(up):
        return algorithm.decode(up._replace(delta=decode(compressor, up.delta)))

    def server(aggregate, down, server, central, key):
        change = trees.scale(aggregate.participation, aggregate.mean.delta)
        estimate = trees.add_where_given(server.estimate, change)
        aggregate = aggregate._replace(mean=aggregate.mean._replace(delta=estimate))
        down, inner = algorithm.server(aggregate, down, server.inner, central, key)
        return down, Ef21Server(inner, estimate)

    return through(algorithm)._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        decode=undo,
        needs=algorithm.needs._replace(mean=True, memories=True),
    )

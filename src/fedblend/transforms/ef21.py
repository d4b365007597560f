# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""EF21: error feedback, which makes biased compressors such as top-k converge.

Wraps an algorithm whose clients send ``delta_i``; each client has an estimate g_i of
its update, the server their weighted mean g. A round::

    c_i   <- C(delta_i - g_i)            sent
    g_i   <- g_i + c_i
    g     <- g + p * mean c_i        p = received weight / all weight
    delta <- g                           the wrapped server's mean update

With the identity as compressor and full participation it is the wrapped run.

Where this differs from the paper: estimates are in units of the update, ``-rate *
gradient``. They start at zero, so that after the first round g_i = C(delta_i), which is
the paper's own start. The estimate of a client outside the cohort does not change, and
the server steps along the mean of all.

Reference: Richtárik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically better,
and practically faster error feedback", NeurIPS 2021, arXiv:2106.05203.
"""

from typing import NamedTuple

import numpy as np

from fedblend import trees
from fedblend.checks import ALGORITHM, gate
from fedblend.compress.compressor import COMPRESSOR, Compressor, decode, encode
from fedblend.core import Algorithm, PyTree
from fedblend.registry import transform
from fedblend.transforms.wrapping import delta_of, with_inner_state


class Ef21Client(NamedTuple):
    """A client's state: the wrapped algorithm's state, and g_i."""

    inner: PyTree
    estimate: PyTree


class Ef21Server(NamedTuple):
    """The server's state: the wrapped algorithm's state, and g."""

    inner: PyTree
    estimate: PyTree


@transform(encodes=True)
@gate(algorithm=ALGORITHM, compressor=COMPRESSOR)
def ef21(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """The wrapped algorithm with compressed corrections to an estimate.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: contractive compressor of every client's correction.
    """
    delta = compressor.delta
    if delta is None:
        raise ValueError(f"ef21: {compressor.name} does not contract; use diana")

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
        update = delta_of(up, "ef21")
        change = trees.subtract(update, trees.where_given(update, client.estimate))
        encoded = encode(compressor, change, key, shard, "ef21")
        received = decode(compressor, encoded, key, "ef21", shard.id)
        estimate = trees.add_where_given(client.estimate, received)
        return up._replace(delta=encoded), Ef21Client(inner, estimate)

    def undo(up, sender):
        delta = decode(compressor, up.delta, sender.key, "ef21", sender.id)
        return algorithm.wire.decode(up._replace(delta=delta), sender)

    def server(aggregate, down, server, central, key):
        change = trees.scale(aggregate.participation, aggregate.mean.delta)
        estimate = trees.add_where_given(server.estimate, change)
        aggregate = aggregate._replace(mean=aggregate.mean._replace(delta=estimate))
        down, inner = algorithm.server(aggregate, down, server.inner, central, key)
        return down, Ef21Server(inner, estimate)

    inner = with_inner_state(algorithm)
    return inner._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        wire=inner.wire._replace(decode=undo),
        needs=algorithm.needs._replace(mean=True, memories=True),
    )

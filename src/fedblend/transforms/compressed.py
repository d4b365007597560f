# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Compressed updates: clients compress what they send, and nothing else changes.

Wraps an algorithm. Over distributed gradient descent this is DCGD::

    delta_i <- the wrapped algorithm's update at client i
    delta   <- mean of C_i(delta_i)

``delta`` alone is compressed, never ``extra``. With the identity as compressor it is
exactly the wrapped run. An unbiased compressor leaves the mean update unchanged and
adds variance, so that a constant rate reaches a neighborhood of the optimum only;
``diana`` and ``ef21`` reach the optimum.

Where this differs from the papers: they compress the gradient, this the update ``-rate
* gradient``, which is the same for a compressor with ``C(r x) = r C(x)``.

Reference: Khirirat, Feyzmahdavian, Johansson, "Distributed learning with compressed
gradients", 2018, arXiv:1806.06573.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from fedblend import compress, trees
from fedblend.checks import Count
from fedblend.compress import sparse as masks
from fedblend.compress.compressor import Compressor, decode, encode
from fedblend.core import Algorithm, PyTree
from fedblend.errors import UserError
from fedblend.registry import transform
from fedblend.transforms._compose import (
    delta_of,
    exact_with_ef21,
    needs_with,
    share_seed,
    silence_feedback,
    warn_of_feedback,
    wrap_inner_state,
)


@transform(encodes=True)
def compressed(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """The wrapped algorithm with compressed updates.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: compressor of every client's ``delta``; see ``fedblend.compress``.
    """
    warn_of_feedback(algorithm.needs.feedback, compressor.name, "compressed")

    def client(down, client, shard, key):
        up, client = algorithm.client(down, client, shard, key)
        delta = encode(compressor, delta_of(up, "compressed"), key, shard, "compress")
        return up._replace(delta=delta), client

    def undo(up, sender):
        delta = decode(compressor, up.delta, sender.key, "compress", sender.id)
        return algorithm.wire.decode(up._replace(delta=delta), sender)

    needs = needs_with(compressor.clients, algorithm, "compressed")
    wire = algorithm.wire._replace(decode=undo)
    return algorithm._replace(client=client, wire=wire, needs=needs)


@transform(encodes=True)
def common_mask(
    algorithm: Algorithm,
    compressor: Compressor,
    *,
    how: Callable[[Algorithm, Compressor], Algorithm] = compressed,
) -> Algorithm:
    """One mask for all clients: they send the same random entries of their updates.

    Wraps an algorithm. The server sends a seed with every message, from which all
    clients draw the same k entries; ``how`` says what is compressed, updates or, in
    DIANA, differences to memories::

        delta_i <- the wrapped algorithm's update at client i
        delta   <- mean of C(delta_i) = C(mean delta_i)      the same C for all clients

    C is linear, so that clients together are one client that compresses their mean: the
    sum of what they send is all that the server needs, and secure sums can hide the
    rest. Where updates are gradients, the mean vanishes at the optimum and so does the
    error: also without memories a constant rate reaches the optimum, if all clients
    take part. The error of the mean is ``omega |mean delta_i|^2``, instead of ``omega/n
    mean |delta_i|^2`` with entries of each client's own: n times as much where all
    clients agree, less where their updates cancel.

    Where this differs from the paper: both compress by a linear map that all clients
    have in common. The paper's is a sketch by hash tables, of which the server keeps
    the largest entries, with momentum and the error of earlier rounds in the sketch.
    Here the map keeps random entries, an unbiased estimate, and the server's step is
    that of the wrapped algorithm.

    Reference: Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora,
    "FetchSGD: communication-efficient federated learning with sketching", ICML 2020,
    arXiv:2007.07682.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: ``rand_k`` with one k and without ``places="sent"``.
        how: the transform that compresses, ``compressed`` or ``diana``.
    """
    if not compressor.masks:
        allowed = 'rand_k with one k for all, and places that are not "sent"'
        raise UserError("common_mask: compressor", compressor, allowed, compressor.name)
    inner = silence_feedback(algorithm)
    return share_seed(
        how(algorithm, compressor),
        lambda seed: how(inner, masks.fix_places(compressor, seed)),
        masks.NAME,
    )


PURPOSE = "permuted"
"""Of the random keys; another word would draw other permutations."""


@transform(encodes=True)
def perm_k(algorithm: Algorithm, *, clients: Count) -> Algorithm:
    """Perm-k updates: together the clients send every entry once.

    Wraps an algorithm. The server sends a common seed with every message, from which
    all n clients draw the same permutation of the entries; client i sends the i-th
    block of its update, one n-th of the entries, scaled by n::

        delta_i <- the wrapped algorithm's update at client i
        delta   <- mean of n * (block i of delta_i)

    Clients with equal updates are averaged without any error, and the variance grows
    with how much updates differ. All clients must take part, with equal weights. A
    client sends the values of its block and nothing else: the server knows the seed and
    the client's id.

    Where this differs from the paper: it compresses updates, ``-rate * gradient``, and
    where n does not divide the number of entries, zeros fill the vector up.

    Reference: Szlendak, Tyurin, Richtárik, "Permutation compressors for provably faster
    distributed nonconvex optimization", ICLR 2022, arXiv:2110.03300.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        clients: the number of clients, all of whom take part in every round.
    """
    warn_of_feedback(algorithm.needs.feedback, "perm_k", "perm_k")
    inner = silence_feedback(algorithm)

    def build(seed: jax.Array) -> Algorithm:
        common = jax.random.wrap_key_data(seed)
        return compressed(inner, compress.perm_k(clients)(common))

    needs = needs_with(clients, algorithm, "perm_k")
    return share_seed(algorithm, build, PURPOSE)._replace(needs=needs)


class Ef21Client(NamedTuple):
    """A client's state: the wrapped algorithm's state, and g_i."""

    inner: PyTree
    estimate: PyTree


class Ef21Server(NamedTuple):
    """The server's state: the wrapped algorithm's state, and g."""

    inner: PyTree
    estimate: PyTree


@transform(encodes=True)
def ef21(algorithm: Algorithm, compressor: Compressor) -> Algorithm:
    """EF21: error feedback, which makes biased compressors such as top-k converge.

    Wraps an algorithm whose clients send ``delta_i``; each client has an estimate g_i
    of its update, the server their weighted mean g. A round::

        c_i   <- C(delta_i - g_i)            sent
        g_i   <- g_i + c_i
        g     <- g + p * mean c_i        p = received weight / all weight
        delta <- g                           the wrapped server's mean update

    With the identity as compressor and full participation it is the wrapped run.

    Where this differs from the paper: estimates are in units of the update, ``-rate *
    gradient``. They start at zero, so that after the first round g_i = C(delta_i),
    which is the paper's own start. The estimate of a client outside the cohort does not
    change, and the server steps along the mean of all.

    Reference: Richtárik, Sokolov, Fatkhullin, "EF21: a new, simpler, theoretically
    better, and practically faster error feedback", NeurIPS 2021, arXiv:2106.05203.

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

    inner, needs = wrap_inner_state(algorithm), algorithm.needs
    return inner._replace(
        enroll=enroll,
        start=start,
        client=client,
        server=server,
        wire=inner.wire._replace(decode=undo),
        needs=needs._replace(mean=True, memories=True, exact=exact_with_ef21(needs)),
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DIANA: compress differences to a memory, so that the compression noise vanishes.

Wraps an algorithm whose clients send ``delta_i``; each client has a memory h_i, the
server their weighted mean h. A round::

    d_i   <- C_i(delta_i - h_i)                sent
    delta <- h + mean d_i                      the wrapped server's mean update
    h_i   <- h_i + b_i d_i
    h     <- h + p * mean (b_i d_i)        p = received weight / all weight

Over distributed gradient descent with b_i <= 1/(omega_i + 1) it converges to the exact
optimum. With full participation this is the paper's algorithm; otherwise the cohort
alone sends d_i, and h still is the mean of all h_i.

Where this differs from the paper: memories are in units of the update, ``-rate *
gradient``, which is the same for a constant rate; b_i may differ by client, and the
server knows all of them. ``start="first"`` is the paper's h_i = gradient of f_i at the
first shared model (such as FLIX's x_avg): in the first round of a client it also sends
d_i uncompressed, and b_i is 1. With full participation the iterates are exactly those
of such memories, since the first difference to them is zero; a client that joins later
starts at the model of that round. The bits of the uncompressed d_i are counted.

Reference: Mishchenko, Gorbunov, Takáč, Richtárik, "Distributed learning with compressed
gradient differences", 2019, arXiv:1901.09269.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedblend import trees
from fedblend.batches import entry_of
from fedblend.checks import ByClient, Number, words
from fedblend.compress.compressor import Compressor, decode, encode
from fedblend.core import Algorithm, PyTree, Ragged
from fedblend.registry import transform
from fedblend.transforms._compose import (
    delta_of,
    needs_with,
    warn_of_feedback,
    wrap_inner_state,
)


class DianaClient(NamedTuple):
    """A client's state: the wrapped algorithm's state, h_i, and whether it is new."""

    inner: PyTree
    memory: PyTree
    new: PyTree = ()


class DianaServer(NamedTuple):
    """The server's state: the wrapped algorithm's state, and h."""

    inner: PyTree
    memory: PyTree


@transform(encodes=True)
def diana(
    algorithm: Algorithm,
    compressor: Compressor,
    *,
    rate: Annotated[
        ByClient | None, Number(above=0, most=1, clients=True, optional=True)
    ] = None,
    start: Annotated[str, words("zero", "first")] = "zero",
) -> Algorithm:
    """The wrapped algorithm with compressed differences to a memory.

    Args:
        algorithm: what to run; an encoding transform goes outermost, and only once.
        compressor: unbiased compressor of every client's difference.
        rate: rate b of the memories, a number or an array over clients, at most
            1/(omega + 1), which is the default. A larger rate is refused as soon as the
            number of entries is known.
        start: the initial h_i: "zero", or "first" for client i's first update, sent
            uncompressed.
    """
    omega = compressor.omega
    if omega is None:
        raise ValueError(f"diana: {compressor.name} is biased; use ef21")
    warn_of_feedback(algorithm.needs.feedback, compressor.name, "diana")

    def rates(dim: int):
        check_rate(rate, omega(dim))
        return 1 / (omega(dim) + 1) if rate is None else rate

    def one_rate(dim: int) -> bool:
        """Whether all memories always follow at one rate, which the server knows."""
        return start == "zero" and np.ndim(rates(dim)) == 0

    def decode_step(encoded, whole, key, client):
        """The decoded difference d_i, and the memory's step b_i d_i."""
        change = decode(compressor, encoded, key, "diana", client)
        own = entry_of(rates(encoded.layout.size), client)
        step = trees.scale(own, change)
        if start == "zero":
            return change, step
        exact = trees.unravel(whole.buffer, encoded.layout)
        return trees.select(whole.used > 0, (exact, exact), (change, step))

    def enroll(params, shard, key):
        join, inner = algorithm.enroll(params, shard, key)
        new = () if start == "zero" else jnp.ones((), bool)
        return join, DianaClient(inner, trees.zeros_like(params), new)

    def begin(params, joins, central, key):
        down, inner = algorithm.start(params, joins, central, key)
        return down, DianaServer(inner, trees.zeros_like(params))

    def client(down, client, shard, key):
        up, inner = algorithm.client(down, client.inner, shard, key)
        delta = delta_of(up, "diana")
        change = trees.subtract(delta, trees.where_given(delta, client.memory))
        encoded = encode(compressor, change, key, shard, "diana")
        whole, new = (), client.new
        if start == "first":
            vector, _ = trees.ravel(change)
            used = jnp.where(new, vector.size, 0).astype(jnp.int32)
            whole, new = Ragged(jnp.where(new, vector, 0), used), jnp.zeros((), bool)
        _, step = decode_step(encoded, whole, key, shard.id)
        after = DianaClient(inner, trees.add_where_given(client.memory, step), new)
        extra = up.extra | {"diana": whole}
        return up._replace(delta=encoded, extra=extra), after

    def undo(up, sender):
        whole, dim = up.extra["diana"], up.delta.layout.size
        change, step = decode_step(up.delta, whole, sender.key, sender.id)
        inner = algorithm.wire.decode(up._replace(delta=change), sender)
        return inner._replace(
            extra=inner.extra | {"diana": () if one_rate(dim) else step}
        )

    def server(aggregate, down, server, central, key):
        step = aggregate.mean.extra["diana"]
        delta = trees.add_where_given(server.memory, aggregate.mean.delta)
        dim = trees.size(aggregate.mean.delta)
        if one_rate(dim):
            step = trees.scale(rates(dim), aggregate.mean.delta)
        step = trees.scale(aggregate.participation, step)
        memory = trees.add_where_given(server.memory, step)
        aggregate = aggregate._replace(mean=aggregate.mean._replace(delta=delta))
        down, inner = algorithm.server(aggregate, down, server.inner, central, key)
        return down, DianaServer(inner, memory)

    needs = needs_with(compressor.clients, algorithm, "diana")
    inner = wrap_inner_state(algorithm)
    return inner._replace(
        enroll=enroll,
        start=begin,
        client=client,
        server=server,
        wire=inner.wire._replace(decode=undo),
        needs=needs._replace(mean=True, memories=True),
    )


def check_rate(rate: Any, omega: float | np.ndarray) -> None:
    """Refuse memories that follow faster than 1/(omega + 1) and may therefore diverge.

    Up to the rounding of float32; a traced rate passes.

    Args:
        rate: b, a number or an array over clients.
        omega: of the compressor, likewise.

    Raises:
        ValueError: the first rate that is too large, its omega and what is allowed.
    """
    if rate is None or isinstance(rate, Tracer):
        return
    rates, omegas = np.broadcast_arrays(np.asarray(rate, np.float64), omega)
    most = 1 / (omegas + 1)
    wrong = np.flatnonzero(~((rates > 0) & (rates <= most * (1 + 1e-6))))
    if wrong.size:
        at = wrong[0]
        whose = f" of client {at}" if rates.ndim else ""
        raise ValueError(
            f"rate: {rates.flat[at]:g}{whose} is not in (0, 1/(omega + 1)] = "
            f"(0, {most.flat[at]:g}] of diana, where omega is {omegas.flat[at]:g}"
        )

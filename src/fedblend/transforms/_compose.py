# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Composition of transforms: what may be wrapped, and what passes through unchanged."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.compress.compressor import Encoded
from fedblend.core import (
    Algorithm,
    Down,
    Key,
    Needs,
    PyTree,
    Up,
    has_ragged,
)
from fedblend.registry import TRANSFORMS


def is_encoded(up: Up) -> bool:
    """Whether the update of a client is no tree of the model's shapes."""
    return isinstance(up.delta, Encoded) or has_ragged(up.delta)


def delta_of(up: Up, transform: str) -> PyTree:
    """The update of a client, or one clear line where there is none to encode."""
    if up.delta is None:
        raise ValueError(
            f"{transform}: clients of the wrapped algorithm send no update"
        )
    if is_encoded(up):
        encoders = ", ".join(n for n, entry in TRANSFORMS.items() if entry.encodes)
        raise ValueError(
            f"{transform}: updates of the wrapped algorithm are encoded already; use "
            f"one of {encoders}, outermost"
        )
    return up.delta


def needs_with(clients: int | None, algorithm: Algorithm, transform: str) -> Needs:
    """The needs of an algorithm under a compressor for so many clients, or for any."""
    needs = algorithm.needs
    if clients is None:
        return needs
    if needs.cohort not in (None, clients):
        raise ValueError(
            f"{transform}: the compressor is for {clients} clients in a round, and the "
            f"wrapped algorithm for {needs.cohort}"
        )
    return needs._replace(
        everyone=True, uniform=True, weights="uniform", cohort=clients
    )


def adds_up(instead: str, key: str) -> str:
    """The line on errors that clients carry from round to round; empty if they do not.

    Args:
        instead: ``feedback`` or ``exact`` of an algorithm's needs.
        key: who compresses.
    """
    return instead and (
        f"{key}: clients carry what the compressor changes over to their next answer, "
        f"where it may add up without end, at any rate; use {instead}, or a compressor "
        "that changes less"
    )


def exact_with_ef21(needs: Needs) -> str:
    """``exact`` of an algorithm under EF21, which only stops errors on the way up."""
    return needs.exact or (needs.feedback and "broadcasts that are not compressed")


def warn_of_feedback(instead: str, compressor: str, transform: str) -> None:
    """Warn where clients carry what a compressor changes from round to round."""
    if instead and compressor != "identity":
        warnings.warn(adds_up(instead, transform), stacklevel=4)


def silence_feedback(algorithm: Algorithm) -> Algorithm:
    """The algorithm for a transform that is built again in every round."""
    return algorithm._replace(needs=algorithm.needs._replace(feedback=""))


def check_length(algorithm: Algorithm, transform: str) -> None:
    """Refuse to clip updates whose length the server relies on."""
    if algorithm.needs.length:
        raise ValueError(
            f"{transform}: the server relies on the length of updates (mixed_fl in "
            "parallel, or two_way without upload), and clipping would minimize another "
            "mixture; use one_way"
        )


def is_linear(step: Callable, delta: PyTree) -> bool:
    """Whether a server's model and state are linear in the mean step of the clients.

    Args:
        step: ``step(delta) -> (down, server)``.
        delta: the mean step, of which only the shapes matter.
    """

    def move_leaves(delta):
        down, server = step(delta)
        leaves = jax.tree.leaves((down.shared, server))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    after = jax.eval_shape(move_leaves, delta)
    try:
        jax.eval_shape(jax.linear_transpose(move_leaves, delta), after)
    except Exception:
        # JAX transposes linear functions alone; which error it raises does not matter.
        return False
    return True


def wrap_inner_state(algorithm: Algorithm) -> Algorithm:
    """The algorithm for clients whose state holds its own state as ``inner``.

    Covers ``personal``, ``ask`` and ``info``; the transform replaces the others.
    """
    return algorithm._replace(
        personal=lambda down, client, shard, key: algorithm.personal(
            down, client.inner, shard, key
        ),
        wire=algorithm.wire._replace(
            ask=lambda client, shard: algorithm.wire.ask(client.inner, shard)
        ),
        info=lambda client: algorithm.info(client.inner),
    )


def share_seed(
    algorithm: Algorithm, build: Callable[[jax.Array], Algorithm], name: str
) -> Algorithm:
    """The algorithm whose clients use, in every round, a seed that all of them know.

    Args:
        algorithm: the server's half, which needs no seed.
        build: from the seed of a round, the data of a key, to the clients' half.
        name: of the random keys and of the seed in a message; another word would draw
            other seeds.
    """

    def send_seed(down: Down, key: Key) -> Down:
        seed = jax.random.key_data(keys.named(key, name))
        return down._replace(extra=down.extra | {name: seed})

    def start(params, joins, central, key):
        down, server = algorithm.start(params, joins, central, key)
        return send_seed(down, key), server

    def client(down, client, shard, key):
        return build(down.extra[name]).client(down, client, shard, key)

    def server(aggregate, down, server, central, key):
        down, server = algorithm.server(aggregate, down, server, central, key)
        return send_seed(down, key), server

    def decode(up, sender):
        return build(sender.down.extra[name]).wire.decode(up, sender)

    wire = algorithm.wire._replace(decode=decode)
    return algorithm._replace(start=start, client=client, server=server, wire=wire)

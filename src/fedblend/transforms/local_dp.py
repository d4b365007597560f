# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local differential privacy: a node clips its update and adds noise before it leaves.

``clip_updates`` bounds the norm of a client's ``delta``; ``add_noise`` adds Gaussian
noise that nobody else can draw, because it comes from the operating system and from no
key. Noise that is drawn again for the same update cancels out of the difference of two
replies, so a node with noise computes a reply once and sends the same bytes whenever it
is asked again (``deploy.client.node``).
"""

import secrets

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, PyTree, Up


class UnboundedError(ValueError):
    """An algorithm whose clients send something that clipping does not bound."""


def clip_updates(algorithm: Algorithm, norm: float) -> Algorithm:
    """The algorithm with updates of at most this l2 norm.

    An update that is not finite becomes zero: it would pass through any noise, and a
    server may choose a model that overflows on some rows and not on others.

    Args:
        algorithm: one whose clients send a change of the model and nothing else; others
            raise ``UnboundedError`` when they are traced.
        norm: the largest l2 norm of a client's ``delta``.
    """

    def enroll(params, shard, key):
        join, state = algorithm.enroll(params, shard, key)
        _only_delta(join, "sends a model of the client's own at enrollment")
        return join, state

    def ask(state, shard):
        request = algorithm.ask(state, shard)
        _only_delta(request, "sends which part of the model the client's rows use")
        return request

    def client(down, state, shard, key):
        up, after = algorithm.client(down, state, shard, key)
        _only_delta(up.extra, "sends more than a change of the model")
        length = jnp.sqrt(trees.squared_norm(up.delta))
        factor = jnp.minimum(1.0, norm / jnp.maximum(length, 1e-30))
        delta = trees.select(
            jnp.isfinite(length),
            trees.scale(factor, up.delta),
            trees.zeros_like(up.delta),
        )
        return up._replace(delta=delta, mean_gradient=None, step_sum=None), after

    return algorithm._replace(enroll=enroll, ask=ask, client=client)


def _only_delta(sent: PyTree, what: str) -> None:
    if jax.tree.leaves(sent):
        raise UnboundedError(f"this algorithm {what}, which clipping does not bound")


def add_noise(up: Up, deviation: float) -> Up:
    """The update with Gaussian noise of this standard deviation, another every time."""

    def noisy(leaf):
        noise = deviation * _normal(leaf.size).reshape(leaf.shape)
        return (np.asarray(leaf, np.float64) + noise).astype(leaf.dtype)

    return up._replace(delta=jax.tree.map(noisy, up.delta))


def _normal(count: int) -> np.ndarray:
    """Standard normal numbers, by the transform of Box and Muller.

    Who knows the change of some coordinates could find out the state of a generator,
    and with it the noise of all others. Bytes of the operating system have no such
    state.
    """
    bits = np.frombuffer(secrets.token_bytes(16 * count), np.uint64).reshape(2, count)
    radius, angle = ((bits >> np.uint64(11)) + 0.5) / 2.0**53
    return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)

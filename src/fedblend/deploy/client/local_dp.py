# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the operator of a node has done to answers before they leave.

The change of the model is cut to a length, and noise is added that nobody else can
draw: it comes from the operating system, and from no key. Noise that were drawn again,
for another message, experiment or policy, would cancel out of the difference of two
answers. So an answer with noise is what is told whenever it is asked for again.
"""

import secrets

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import trees
from fedblend.core import Algorithm, Up
from fedblend.deploy.client.node import Refusal
from fedblend.deploy.client.policy import Protect


def guarded(algorithm: Algorithm, longest: float) -> Algorithm:
    """The algorithm, whose clients answer with at most this length.

    What is not finite becomes zero: it would pass through any noise, and a server may
    choose a model that overflows on some rows and not on others.
    """

    def enroll(params, shard, key):
        join, client = algorithm.enroll(params, shard, key)
        if jax.tree.leaves(join):
            raise Refusal(
                "policy protect.clip: this algorithm tells of a model of this node's "
                "own at enrollment, which clipping does not bound"
            )
        return join, client

    def ask(client, shard):
        request = algorithm.ask(client, shard)
        if jax.tree.leaves(request):
            raise Refusal(
                "policy protect.clip: this algorithm tells which part of the model "
                "this node's rows use, which clipping does not bound"
            )
        return request

    def client(down, client, shard, key):
        up, after = algorithm.client(down, client, shard, key)
        if jax.tree.leaves(up.extra):
            raise Refusal(
                "policy protect.clip: this algorithm says more than a change of the "
                "model, which clipping does not bound"
            )
        norm = jnp.sqrt(trees.squared_norm(up.delta))
        short = jnp.minimum(1.0, longest / jnp.maximum(norm, 1e-30))
        delta = trees.select(
            jnp.isfinite(norm),
            trees.scale(short, up.delta),
            trees.zeros_like(up.delta),
        )
        return up._replace(delta=delta, mean_gradient=None, step_sum=None), after

    return algorithm._replace(enroll=enroll, ask=ask, client=client)


def noisy(protect: Protect, up: Up) -> Up:
    """An answer that was cut, with the operator's noise; other noise every time."""
    assert protect.clip is not None
    deviation = protect.noise * protect.clip

    def drawn(leaf):
        noise = deviation * _normal(leaf.size).reshape(leaf.shape)
        return (np.asarray(leaf, np.float64) + noise).astype(leaf.dtype)

    return up._replace(delta=jax.tree.map(drawn, up.delta))


def _normal(count: int) -> np.ndarray:
    """Standard normal numbers, by the transform of Box and Muller.

    A generator with a state could be found out from the coordinates whose change is
    known, and would then tell the noise of all others.
    """
    bits = np.frombuffer(secrets.token_bytes(16 * count), np.uint64).reshape(2, count)
    radius, angle = ((bits >> np.uint64(11)) + 0.5) / 2.0**53
    return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)

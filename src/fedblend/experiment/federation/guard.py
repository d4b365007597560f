# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What the operator of a node has done to answers before they leave.

The change of the model is cut to a length, and noise is added that nobody else can
draw: its key comes from a secret of the node's, the experiment and the round, so that
an answer that has to be computed again is the same one. The same noise on two answers
to different messages would cancel out: under noise a round is answered for one message.
"""

import os
import secrets
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.core import Algorithm, Key
from fedblend.experiment.federation.policy import Protect
from fedblend.runtime.flower.node import Refusal


def secret_key(path: Path) -> Key:
    """The key made of a node's secret, which is written when it is first needed."""
    if not path.exists():
        beside = path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(beside, flags, 0o600), "wb") as file:
            file.write(secrets.token_bytes(8))
            os.fsync(file.fileno())
        os.replace(beside, path)
    words = np.frombuffer(path.read_bytes(), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words))


def guarded(
    algorithm: Algorithm, protect: Protect, secret: Key, experiment: str
) -> Algorithm:
    """The algorithm, with what the operator wants done to a client's answers."""
    if protect.clip is None:
        return algorithm
    longest = protect.clip
    own_key = keys.named(keys.named(secret, "guard"), experiment)

    def enroll(params, shard, key):
        hello, client = algorithm.enroll(params, shard, key)
        if jax.tree.leaves(hello):
            raise Refusal(
                "policy protect.clip: this algorithm tells of a model of this node's "
                "own at enrolment, which clipping does not bound"
            )
        return hello, client

    def client(down, client, shard, key):
        up, after = algorithm.client(down, client, shard, key)
        if jax.tree.leaves(up.extra):
            raise Refusal(
                "policy protect.clip: this algorithm says more than a change of the "
                "model, which clipping does not bound"
            )
        norm = jnp.sqrt(trees.squared_norm(up.delta))
        short = jnp.minimum(1.0, longest / jnp.maximum(norm, 1e-30))
        delta = trees.scale(short, up.delta)
        if protect.noise:
            own = jax.random.fold_in(own_key, down.round)
            delta = _noisy(delta, protect.noise * longest, own)
        return up._replace(delta=delta, slope=None, stretch=None), after

    return algorithm._replace(enroll=enroll, client=client)


def _noisy(tree, scale: float, key: Key):
    leaves, structure = jax.tree.flatten(tree)
    noisy = [
        leaf
        + scale
        * jax.random.normal(jax.random.fold_in(key, place), leaf.shape, leaf.dtype)
        for place, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, noisy)

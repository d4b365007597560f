# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The client's half of LoCoDL: x_i, u_i, and what it sends."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.algorithms.locodl.settings import Settings
from fedblend.compress import one_mask
from fedblend.compress.compressor import decode, encode
from fedblend.core import PyTree, Quote, Up
from fedblend.local import descend_times
from fedblend.losses import gradient


class LocodlClient(NamedTuple):
    """What a client keeps: u_i and v; xhat_i, yhat, d_i and the mask of its last round.

    v is with the server where there is a central loss. ``new``: there was no round yet.
    """

    dual: PyTree
    common: PyTree
    reached: PyTree
    target: PyTree
    sent: PyTree
    seed: PyTree
    new: jax.Array


def functions(settings: Settings) -> dict[str, Any]:
    """``enroll``, ``client``, ``personal`` and ``decode``."""
    alone, one = settings.central is None, settings.one
    gradient_at = gradient(settings.loss)

    def slope(params, batch):
        return trees.subtract(
            gradient_at(params, batch), trees.scale(settings.moved_of(params), params)
        )

    def enroll(params, shard, key):
        zeros, new = trees.zeros_like(params), jnp.ones((), bool)
        seed = jnp.zeros(2, jnp.uint32) if one else ()
        common = zeros if alone else ()
        return (), LocodlClient(zeros, common, params, params, zeros, seed, new)

    def received(down, client):
        """The shared model y, also from the entries that changed."""
        if not isinstance(down.shared, one_mask.Told):
            return down.shared
        known = client.target, client.seed
        return one_mask.received(settings.compressor, down.shared, *known)

    def settled(y, client):
        """The models x_i, u_i and v after the communication of which y tells."""
        rho, eta = settings.scales(y)
        d = trees.scale(1 / rho, trees.subtract(y, client.target))
        ahead = trees.subtract(client.reached, client.target)
        x = trees.add(y, trees.scale(1 - rho, ahead))
        dual = trees.add(client.dual, trees.scale(eta, trees.subtract(d, client.sent)))
        common = trees.add(client.common, trees.scale(eta, d)) if alone else ()
        before = (y, client.dual, client.common)
        return trees.select(client.new, before, (x, dual, common))

    def client(down, client, shard, key):
        y, seed, local = received(down, client), down.extra.seed, down.extra.local
        x, dual, common = settled(y, client)
        push = trees.add_where_given(trees.scale(-1, dual), down.correction)
        train = partial(descend_times, slope, work=settings.work)
        reached, mean = train(x, shard, key, times=local, correction=push)
        target = down.extra.target
        if alone:
            target = settings.drifted(y, common, local, None, key)
        own, gap = settings.at(seed), trees.subtract(reached, target)
        encoded = encode(own, gap, key, shard, "locodl")
        sent, last = decode(own, encoded), seed.value if one else ()
        quote = Quote(seed.value, seed.name) if one else ()
        new = jnp.zeros((), bool)
        after = LocodlClient(dual, common, reached, target, sent, last, new)
        return Up(encoded, mean, extra=quote), after

    def undo(up):
        return up._replace(delta=decode(settings.at(up.extra), up.delta), extra=())

    def personal(down, client, shard, key):
        return received(down, client)

    deployed = {"personal": personal} if one else {}
    return {"enroll": enroll, "client": client, "decode": undo, **deployed}

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What APFL and its variants have in common: three variables, descended together.

A client steps on the shared model w, its own v and their weight, all from old values::

    (w, v, alpha) <- (w, v, alpha) - (rate, rate, alpha's rate) * direction(w, v, alpha)

then clips alpha to [0, 1]. Each has an optimizer of its own: w moves as with FedAvg.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedblend import keys, trees
from fedblend.algorithms.apfl_alpha import moving
from fedblend.core import Algorithm, PyTree, Shard, Up
from fedblend.local import Optimizer, Work, descend, planned, resolve, step_sum_of
from fedblend.mixing import Mixing
from fedblend.shards import part
from fedblend.solvers import Solver


class Variables(NamedTuple):
    """What a client descends: w, v and alpha."""

    shared: PyTree
    personal: PyTree
    alpha: PyTree


class ApflClient(NamedTuple):
    """What a client keeps: v, alpha, and its last w where that is what it deploys."""

    personal: PyTree
    alpha: PyTree
    last: PyTree


class Parts(NamedTuple):
    """What a variant chooses beside the direction; ``apfl`` says what each means."""

    alpha: Callable[[PyTree, Shard], PyTree]
    mix: Mixing
    learn: str
    alpha_rate: Optimizer | None = None
    held_out: float = 0.0
    hand_back: float = jnp.inf
    fresh: bool = False
    local: Solver | None = None
    aggregated: bool = True


def assembled(
    inner: Algorithm,
    direction: Callable[..., Variables],
    work: Work,
    parts: Parts,
) -> Algorithm:
    """An algorithm of three variables over the server of another.

    Args:
        inner: whose server it takes.
        direction: from the variables and batches for w, v and alpha to gradients.
        work: local work; its optimizer is that of w and of v, each on its own.
        parts: everything else.
    """

    def enroll(params, shard, key):
        own = keys.named(key, "local model")
        personal = params if parts.local is None else parts.local(params, shard, own)[0]
        last = () if parts.aggregated else params
        return (), ApflClient(personal, parts.alpha(params, shard), last)

    def client(down, client, shard, key):
        share = jnp.where(down.round < parts.hand_back, parts.held_out, 0.0)
        held = part(shard, 0.0, share)
        seen = part(shard, share, 1.0) if parts.held_out else shard
        own, _ = planned(seen, work)
        rule = resolve(work.optimizer, down.round, own)
        pace = work.optimizer if parts.alpha_rate is None else parts.alpha_rate
        # Who holds out nothing (any more) has an empty batch, and keeps its alpha.
        able = held.count > 0 if parts.held_out else True
        pace = moving(resolve(pace, down.round, own), parts.learn, able)
        rules = optax.partition(
            {"w": rule, "v": rule, "alpha": pace}, Variables("w", "v", "alpha")
        )

        def towards(here, batch, *others):
            personal = others[0] if parts.fresh else batch
            judge = others[-1] if parts.held_out else personal
            return direction(here, batch, personal, judge)

        others = ["fresh batch"] if parts.fresh else []
        others += [("held-out batch", held)] if parts.held_out else []
        after, mean_gradient = descend(
            towards,
            Variables(down.shared, *client[:2]),
            seen,
            key,
            work=work._replace(optimizer=rules),
            round=down.round,
            correction=Variables(down.correction, None, None),
            further=others,
        )
        far = step_sum_of(work, seen, down.round)
        up = Up(
            trees.subtract(after.shared, down.shared),
            mean_gradient.shared,
            step_sum=far,
        )
        last = () if parts.aggregated else after.shared
        return up, ApflClient(after.personal, after.alpha, last)

    def personal(down, client, shard, key):
        del shard, key
        shared = down.shared if parts.aggregated else client.last
        return parts.mix(client.alpha, shared, client.personal)

    def info(client):
        alphas = jax.tree.leaves(client.alpha)
        return {"alpha": sum(alphas) / len(alphas)}

    return inner._replace(enroll=enroll, client=client, personal=personal, info=info)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The server's half of LoCoDL: y, v, the coin, and the steps of y on a central loss."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedblend import keys, trees
from fedblend.algorithms.locodl.settings import Sent, Settings
from fedblend.compress import one_mask
from fedblend.core import Down, Key, PyTree, Shard


class LocodlServer(NamedTuple):
    """The server: v, yhat of the round that runs, and all local steps so far."""

    dual: PyTree
    target: PyTree
    local: jax.Array


def functions(settings: Settings) -> dict[str, Any]:
    """``start``, ``server`` and ``tell``."""

    def begun(
        down: Down, server: LocodlServer, past: PyTree, rows: Shard | None, key: Key
    ) -> tuple[Down, LocodlServer]:
        """The message of the next round, and the server's state in it."""
        own, steps = keys.named(key, "scaffnew"), keys.named(key, "central")
        local = jax.random.geometric(own, settings.p, dtype=jnp.int32)
        target = settings.drifted(down.shared, server.dual, local, rows, steps)
        extra = Sent(local, () if settings.central is None else target)
        if settings.one:
            extra = extra._replace(seed=one_mask.seed_of(key), past=past)
        return down._replace(extra=extra), server._replace(target=target)

    def start(params, joins, central, key):
        none = jnp.zeros((), jnp.int32)
        server = LocodlServer(trees.zeros_like(params), params, none)
        past = one_mask.unchanged(params)
        return begun(Down(params, none), server, past, central, key)

    def server(aggregate, down, server, central, key):
        d = trees.scale(0.5, aggregate.mean.delta)
        rho, eta = settings.scales(d)
        change, dual = trees.scale(rho, d), trees.add(server.dual, trees.scale(eta, d))
        past = one_mask.changed(change, down.extra.seed) if settings.one else ()
        down = down._replace(shared=trees.add(server.target, change))
        after = LocodlServer(dual, server.target, server.local + down.extra.local)
        return begun(down, after, past, central, key)

    def tell(down, request):
        if not settings.one:
            return down
        shared = one_mask.told(settings.compressor, down.shared, down.extra.past)
        return down._replace(shared=shared, extra=down.extra._replace(past=()))

    return {"start": start, "server": server, "tell": tell}

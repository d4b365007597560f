# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The local steps of partial personalization: in turn (FedAlt), or at once (FedSim).

Both take the shared part u from the message, which has None where the personal part v
is, and v, which has None where u is.
"""

from typing import Any, NamedTuple

import jax
import optax

from fedblend import keys, trees
from fedblend.core import Batch, Down, Key, Loss, PyTree, Shard, Up
from fedblend.local import Work, descend, local_update, planned, resolve
from fedblend.losses import objective


class Parts(NamedTuple):
    """The two parts of the parameters, None in each where the other is."""

    shared: PyTree
    personal: PyTree


def at(loss: Loss, here: Parts, batch: Batch) -> jax.Array:
    """The mean loss of both parts, put together."""
    return objective(loss, trees.fill(here.shared, here.personal), batch)


def alternate(
    loss: Loss, work: Parts, down: Down, own: PyTree, shard: Shard, key: Key
) -> tuple[Up, PyTree]:
    """Steps on v at the u that was broadcast, then steps on u at the new v.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work on each part.
        down: the server's message, with u.
        own: the client's v.
        shard: its rows.
        key: randomness of the batches.

    Returns:
        The answer to the server, and the new v.
    """

    def of_own(here, batch):
        return jax.grad(lambda v: at(loss, Parts(down.shared, v), batch))(here)

    # FedRep drew the batches of its head by this name before it was a case of this.
    first = keys.named(key, "head")
    own, _ = descend(of_own, own, shard, first, work=work.personal, round=down.round)

    def of_shared(here, batch):
        return jax.grad(lambda u: at(loss, Parts(u, own), batch))(here)

    return local_update(of_shared, down, shard, key, work=work.shared), own


def together(
    loss: Loss, work: Parts, down: Down, own: PyTree, shard: Shard, key: Key
) -> tuple[Up, PyTree]:
    """Steps on u and v at once, both from the old ones and on the same batch.

    Arguments and result as of ``alternate``; of the work on v the optimizer counts.
    """
    main: Work = work.shared
    steps, _ = planned(shard, main)
    rules: dict[Any, optax.GradientTransformation] = {
        name: resolve(one.optimizer, down.round, steps)
        for name, one in work._asdict().items()
    }

    def direction(here, batch):
        return jax.grad(lambda parts: at(loss, parts, batch))(here)

    reached, mean_gradient = descend(
        direction,
        Parts(down.shared, own),
        shard,
        key,
        work=main._replace(optimizer=optax.partition(rules, Parts(*rules))),
        round=down.round,
        correction=Parts(down.correction, None),
    )
    delta = trees.subtract(reached.shared, down.shared)
    return Up(delta, mean_gradient.shared), reached.personal

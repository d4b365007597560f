# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local only: every client trains its own model and sends nothing.

The baseline of personalization: a client that does better alone should not join. A
round, for every client i of the cohort::

    personal_i <- steps of SGD on f_i from personal_i,     personal_i = params at first

Nothing travels in either direction, so it costs no bits. ``down.shared`` stays at the
initial parameters.
"""

from functools import partial
from typing import NamedTuple

from fedblend.core import Algorithm, Loss, PyTree, Up, Wire, start_with_params
from fedblend.local import Work, descend
from fedblend.losses import gradient
from fedblend.registry import NewClient, algorithm


class LocalClient(NamedTuple):
    """The state of a client: its own model."""

    personal: PyTree


@algorithm(sends=(), new_client=NewClient(whole_run=True))
def local_only(loss: Loss, work: Work) -> Algorithm:
    """Every client trains its own model.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        work: local work of a round: optimizer, steps, batch size.
    """
    train = partial(descend, gradient(loss), work=work)

    def enroll(params, shard, key):
        return (), LocalClient(params)

    def client(down, client, shard, key):
        reached, _ = train(client.personal, shard, key, round=down.round)
        return Up(delta=None), LocalClient(reached)

    return Algorithm(
        enroll,
        start_with_params,
        client,
        server=lambda aggregate, down, server, central, key: (down, server),
        personal=lambda down, client, shard, key: client.personal,
        wire=Wire(
            tell=lambda down, request: down._replace(shared=None, correction=None)
        ),
    )

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What clients tell of their rows, for alike ones to be found; see ``clusters``."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.checks import COUNT, FUNCTION, gate
from fedblend.core import Key, Loss, PyTree, Shard, static_bits
from fedblend.data import map_clients
from fedblend.data.federated import FEDERATION, FederatedData
from fedblend.losses import gradient
from fedblend.shards import everything


class Signatures(NamedTuple):
    """A row of ``values`` for every client; bits are those of one client."""

    values: np.ndarray
    bits_up: int
    bits_down: int


@gate(loss=FUNCTION, federated_data=FEDERATION, size=COUNT)
def gradient_signatures(
    loss: Loss,
    params: PyTree,
    federated_data: FederatedData,
    key: Key,
    *,
    size: int = 16,
) -> Signatures:
    """The direction of every client's gradient, in ``size`` numbers.

    Args:
        loss: ``loss(params, rows) -> losses[rows]``.
        params: the model at which all take their gradient.
        federated_data: the clients' data.
        key: of the random projection, the same for all clients.
        size: numbers of a signature, at most one for each parameter. They and the
            download of ``params`` are its cost.
    """
    dim = trees.size(params)
    size = min(size, dim)
    lots = jax.random.normal(keys.named(key, "signature"), (dim, size), jnp.float32)
    axes, _ = jnp.linalg.qr(lots)

    def sign(slope, shard):
        del shard
        vector, _ = trees.ravel(slope)
        length = jnp.linalg.norm(vector)
        direction = vector / jnp.where(length > 0, length, 1)
        return np.sqrt(dim / size) * (direction @ axes.astype(vector.dtype))

    values = np.asarray(
        at_every_client(loss, lambda shard: params, sign, federated_data)
    )
    return Signatures(values, static_bits(values[0]), static_bits(params))


@gate(federated_data=FEDERATION, classes=COUNT)
def label_signatures(federated_data: FederatedData, classes: int) -> Signatures:
    """The share of each class among every client's rows ``(inputs, labels)``."""
    labels = [
        federated_data.train.rows(client)[1] for client in range(federated_data.clients)
    ]
    shares = [np.bincount(own, minlength=classes) / len(own) for own in labels]
    values = np.stack(shares).astype(np.float32)
    return Signatures(values, static_bits(values[0]), 0)


def at_every_client(
    loss: Loss,
    model_of: Callable[[Shard], PyTree],
    look: Callable[[PyTree, Shard], jax.Array],
    federated_data: FederatedData,
) -> jax.Array:
    """What ``look`` makes of every client's full gradient, at its model."""
    slope_at = gradient(loss)

    def one(shard: Shard) -> jax.Array:
        return look(slope_at(model_of(shard), everything(shard)), shard)

    return map_clients.mapped(one, federated_data.train)

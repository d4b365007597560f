# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""kNN-Per: a client's nearest training rows join the predictions of the shared model.

In ``contrib``: no number of its paper is reproduced, no bound of it is checked.

Any algorithm trains the shared model, FedAvg in the paper. A client deploys that model
beside the features and labels of its training rows, ``models.neighbors``::

    p_i(y | x) = alpha_i p_shared(y | x) + (1 - alpha_i) p_kNN,i(y | x)
    alpha_i = the best of 1/grid, 2/grid, ..., 1, by the loss on held-out rows

The paper's weight of the neighbors is ``lam_i = 1 - alpha_i``. Nothing is trained at a
client beyond the shared model, and nothing more is sent.

A new client deploys the shared model beside its own rows. It takes no steps, so that
``--steps`` and ``--rate`` do not apply.

Where this differs from the paper: the held-out rows are a part of the training rows
that does not vote while alpha_i is chosen, and votes after it; a client without any
deploys the shared model. alpha_i is never 0, so that a class that no neighbor has keeps
a probability. All rows at the distance of the k-th neighbor vote. Votes have the
weights of the authors' code, exp(-distance^2 / (width * scale)) with the width of the
features, at its default scale, so that wide and narrow features need no other scale.
The paper's text has exp(-distance).

Reference: Marfoq, Neglia, Kameni, Vidal, "Personalized federated learning through local
memorization", ICML 2022, arXiv:2111.09360.
"""

from typing import Annotated

import jax
import jax.numpy as jnp

from fedblend import trees
from fedblend.batches import everything, part
from fedblend.checks import (
    Chance,
    Count,
    Number,
    Positive,
)
from fedblend.core import Algorithm, Loss, Shard
from fedblend.errors import UserError
from fedblend.losses import objective
from fedblend.mixing import Apply, Blend, Neighbors
from fedblend.registry import SOLVES, algorithm


@algorithm(form="neighbors", new_client=SOLVES, reads="losses")
def knn_per(
    algorithm: Algorithm,
    loss: Loss,
    *,
    features: Apply,
    k: Count = 10,
    scale: Positive = 1.0,
    held_out: Chance = 0.2,
    grid: Annotated[int, Number(least=2, whole=True)] = 10,
) -> Algorithm:
    """The wrapped algorithm, deployed with the nearest rows of each client.

    Args:
        algorithm: trains the shared model.
        loss: ``loss(params, rows) -> losses[rows]`` of ``models.neighbors``.
        features: ``features`` of that model; rows are inputs and labels.
        k: how many rows vote on a prediction.
        scale: of the weights exp(-distance^2 / (width * scale)) of their votes, where
            width is that of the features; a large one makes all k votes equal.
        held_out: fraction of a client's training rows on which alpha is chosen.
        grid: number of alphas to try, from 1/grid to 1.

    Example:
        >>> import jax, jax.numpy as jnp, fedblend as fb
        >>> rows = jnp.tile(jnp.arange(4.0), 10)[:, None], jnp.tile(jnp.arange(2), 20)
        >>> model = fb.models.neighbors(fb.models.logistic(1))
        >>> loss = fb.losses.logistic(model.apply)
        >>> average = fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=None))
        >>> algorithm = fb.algorithms.knn_per(
        ...     average, loss, features=model.features, k=5)
        >>> data = fb.federate(rows, [range(40)])
        >>> run = fb.simulate(algorithm, model.init, data, jax.random.key(0), rounds=1)
        >>> own = run.complete().personal(0)
        >>> round(float(own.alpha), 4), (model.apply(own, rows[0][:4]) > 0).tolist()
        (0.1, [False, True, False, True])
    """

    def add_neighbors(model, alpha, shard: Shard):
        inputs, labels = everything(shard).rows
        count = shard.count.astype(jnp.int32)
        found = features(model, inputs)
        votes = jnp.int32(k), jnp.asarray(scale, found.dtype)
        return Neighbors(alpha, model, found, labels, count, *votes)

    def personal(down, client, shard, key):
        model = algorithm.personal(down, client, shard, key)
        if isinstance(model, Blend | Neighbors):
            said, allowed = type(model).__name__, "an algorithm that deploys one model"
            raise UserError("knn_per: algorithm", model, allowed, f"one with a {said}")
        seen, unseen = part(shard, held_out, 1.0), part(shard, 0.0, held_out)
        dtype = jnp.result_type(*jax.tree.leaves(model))
        alphas = jnp.arange(grid, 0, -1).astype(dtype) / grid
        memory = add_neighbors(model, alphas[0], seen)

        def try_alpha(alpha):
            own = memory._replace(alpha=alpha)
            return objective(loss, own, everything(unseen))

        losses = jax.lax.map(try_alpha, alphas)
        best = jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))
        return add_neighbors(model, trees.take(alphas, best), shard)

    return algorithm._replace(personal=personal)

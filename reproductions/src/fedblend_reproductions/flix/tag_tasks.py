# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Tags from bags of words: workers with the posts of users, as in FLIX's Figure 1.

Seeds differ in who holds which rows. To run them as replicas of one sweep, a federation
here holds no rows but their numbers, one column a seed, and the loss of a replica looks
up those of its own seed.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import losses, metrics, models
from fedblend.batches import everything
from fedblend.core import Loss, PyTree, Shard
from fedblend.data.dataset import Dataset
from fedblend.data.federated import FederatedData, Shards
from fedblend.models.model import Model


class Deal(NamedTuple):
    """How a user's posts are partitioned; the rest is for testing.

    Validation and test rows of a user are shared by all its workers.
    """

    workers: int
    training: int
    """Rows of each worker."""
    validation: int


class TagTask(NamedTuple):
    """Workers with rows of users, partitioned anew for every seed."""

    name: str
    federated_data: FederatedData
    bags: jax.Array
    tags: jax.Array
    model: Model
    seeds: int

    @property
    def smooth(self) -> np.ndarray:
        """L_i, the smoothness of every worker's loss, [seeds, workers]."""
        train, bags = self.federated_data.train, np.asarray(self.bags)
        own = [train.rows(worker) for worker in range(self.federated_data.clients)]
        largest = [
            [np.linalg.norm(bags[rows[:, seed]], 2) ** 2 / len(rows) for rows in own]
            for seed in range(self.seeds)
        ]
        return np.array(largest, np.float32) / (4 * self.tags.shape[1])

    def loss(self, seed: jax.Array | int) -> Loss:
        """Sigmoid cross entropy, averaged over the tags, on the rows of a seed."""
        plain = losses.multilabel(self.model.apply)
        return lambda params, numbers: plain(params, self._rows(numbers, seed))

    def measured(
        self, models: PyTree, seeds: np.ndarray, shard: Shard
    ) -> tuple[jax.Array, jax.Array]:
        """Loss and recall@5 of models, one a replica, on a worker's rows."""
        # Of one shape for all splits, or each would be compiled apart.
        room = max(split.capacity for split in self.federated_data.splits.values())
        batch = everything(dataclasses.replace(shard, capacity=room))
        recall = metrics.recall_at(self.model.apply, 5)

        def of(params, seed):
            loss = metrics.mean_loss(self.loss(seed))(params, batch)
            own = batch._replace(rows=self._rows(batch.rows, seed))
            return loss, recall(params, own)

        return jax.vmap(of)(models, seeds)

    def _rows(self, numbers: jax.Array, seed: jax.Array | int) -> PyTree:
        mine = numbers[:, seed]
        return self.bags[mine], self.tags[mine]


def tag_task(
    name: str, data: Dataset, *, users: int, deal: Callable[[int], Deal], seeds: int
) -> TagTask:
    """Workers for the users with the most posts.

    Args:
        name: for figures.
        data: from ``sources.stackexchange``.
        users: how many.
        deal: from the number of a user's posts to what is made of them.
        seeds: the number of partitions.
    """
    names, counts = np.unique(np.asarray(data.keys), return_counts=True)
    most = names[np.argsort(-counts, kind="stable")][:users]
    own = [np.flatnonzero(data.keys == user) for user in most]
    numbers = np.concatenate([_shuffled(rows, seeds) for rows in own])
    starts = np.cumsum([0, *(len(rows) for rows in own[:-1])])
    spans = np.concatenate(
        [
            _spans(start, len(rows), deal(len(rows)))
            for start, rows in zip(starts, own, strict=True)
        ]
    )
    train, validation, test = (Shards(numbers, *spans[:, k].T) for k in range(3))
    bags, tags = map(jnp.asarray, data.rows)
    model = models.softmax(bags.shape[1], tags.shape[1], intercept=False)
    federated_data = FederatedData(train, validation, test)
    return TagTask(name, federated_data, bags, tags, model, seeds)


def _shuffled(rows: np.ndarray, seeds: int) -> np.ndarray:
    """Rows in another order for every seed, [rows, seeds]."""
    orders = [
        np.random.default_rng((s, rows[0])).permutation(rows) for s in range(seeds)
    ]
    return np.stack(orders, axis=1).astype(np.int32)


def _spans(start: int, posts: int, deal: Deal) -> np.ndarray:
    """First row and number of rows of a user's workers, [workers, splits, 2]."""
    held = start + deal.workers * deal.training
    tested = held + deal.validation
    return np.array(
        [
            [
                (start + worker * deal.training, deal.training),
                (held, deal.validation),
                (tested, start + posts - tested),
            ]
            for worker in range(deal.workers)
        ]
    )

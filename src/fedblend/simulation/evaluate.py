# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Measuring the models of clients, all of them or a fixed sample.

Pure functions of arrays for one replica, like those of ``rounds``, and ``Evaluation``,
what a run measures on whom.
"""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.batches import everything
from fedblend.core import Algorithm, Down, Key, PyTree, Shard, shared_model
from fedblend.data.federated import Shards
from fedblend.gains import Evidence, Measured
from fedblend.metrics import Metric, evaluate
from fedblend.simulation.rounds import Members, Settings, shard_of

MEASURE_BYTES = 2**28
"""Memory that the rows of clients measured side by side may take."""

Values = dict[str, dict[str, dict[str, jax.Array]]]
"""``{split: {model: {metric: value}}}`` of one client."""


def message_to_deploy(
    algorithm: Algorithm, down: Down, state: PyTree, shard: Shard
) -> Down:
    """The message from which a client makes the model that it uses."""
    if algorithm.needs.whole:
        return down
    return algorithm.tell(down, algorithm.ask(state, shard))


def personal(
    settings: Settings, hyper: Any, root: Key, down: Down, state: PyTree, shard: Shard
) -> PyTree:
    """The model that one client would deploy, from the message and its state."""
    algorithm = settings.build(hyper)
    message = message_to_deploy(algorithm, down, state, shard)
    key = keys.at(root, "personal", down.round, shard.id)
    return algorithm.personal(message, state, shard, key)


def evaluate_client(
    algorithm: Algorithm,
    metrics: Mapping[str, Metric],
    personal: PyTree,
    shared: PyTree,
    held: Mapping[str, Shard],
) -> tuple[Values, Values]:
    """The metrics of one client's models on its rows of each split, and by rows.

    Args:
        algorithm: whose models they are.
        metrics: what to measure.
        personal: what the client deploys.
        shared: the shared model; None where the server sends none.
        held: the client's rows, by split.
    """
    one_for_all = algorithm.personal is shared_model
    models = {"personal": personal}
    if jax.tree.leaves(shared) and not one_for_all:
        models["shared"] = shared
    numbers, by_row = {}, {}
    for split, rows in held.items():
        batch = everything(rows)
        numbers[split], by_row[split] = {}, {}
        for name, model in models.items():
            found = evaluate(metrics, model, batch)
            numbers[split][name], by_row[split][name] = found
        if one_for_all:
            for of in (numbers[split], by_row[split]):
                of["shared"] = of["personal"]
    return numbers, by_row


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What to measure, on whom.

    ``ids`` are the clients, at most ``most`` of them measured side by side.
    """

    metrics: Mapping[str, Metric]
    splits: Mapping[str, Shards]
    ids: np.ndarray
    replicas: int | None
    most: int

    @property
    def counts(self) -> dict[str, np.ndarray]:
        """The measured clients' rows in each split."""
        return {name: split.counts[self.ids] for name, split in self.splits.items()}

    @cached_property
    def chunk(self) -> int:
        """Clients measured side by side: as in training, if their rows fit."""
        window = max(
            split.capacity * leaf[:1].nbytes
            for split in self.splits.values()
            for leaf in jax.tree.leaves(split.examples)
        )
        fitting = max(MEASURE_BYTES // (window * (self.replicas or 1)), 1)
        return int(min(fitting, self.most, len(self.ids)))

    @property
    def padded_ids(self) -> np.ndarray:
        """The measured clients, some of them again to fill the last chunk."""
        return np.resize(self.ids, len(self.ids) + -len(self.ids) % self.chunk)

    @property
    def places(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Where the rows of ``padded_ids`` start in each split, and how many."""
        ids = self.padded_ids
        return {
            name: (
                jnp.asarray(split.starts[..., ids], jnp.int32),
                jnp.asarray(split.counts[ids], jnp.int32),
            )
            for name, split in self.splits.items()
        }

    def measure(
        self,
        settings: Settings,
        hyper: Any,
        root: Key,
        down: Down,
        states: PyTree,
        examples: Mapping[str, PyTree],
        members: Members,
        places: Mapping[str, tuple[jax.Array, jax.Array]],
    ) -> tuple[PyTree, PyTree]:
        """Metrics of clients in one replica: ``{split: {model: {metric: values}}}``.

        Also what each row contributes, [clients, rows]: of held-out rows where there
        are some. States, members and places are those of ``padded_ids``. Methods whose
        server sends nothing have no shared model to measure.
        """
        algorithm = settings.build(hyper)
        capacity = {name: split.capacity for name, split in self.splits.items()}
        paired = [name for name in places if name != "train"] or list(places)

        def one(client):
            state, member, rows = client
            shard = shard_of(settings, examples["train"], member)
            message = algorithm.tell(down, algorithm.ask(state, shard))
            held = {
                name: Shard(examples[name], start, count, member.ids, capacity[name])
                for name, (start, count) in rows.items()
            }
            numbers, by_row = evaluate_client(
                algorithm,
                self.metrics,
                personal(settings, hyper, root, down, state, shard),
                down.shared if jax.tree.leaves(message.shared) else None,
                held,
            )
            return numbers, {split: by_row[split] for split in paired}

        return jax.lax.map(one, (states, members, places), batch_size=self.chunk)

    def by_replica(
        self, values: tuple[PyTree, PyTree], alone: Evidence | None
    ) -> tuple[list[Measured], list[Measured]]:
        """What ``measure`` found in each replica, and what single rows contribute.

        ``alone`` is that of training alone: its personal models are every client's
        alternative to taking part, "local" in the result.
        """
        values = jax.device_get(values)
        if self.replicas is None:
            values = jax.tree.map(lambda leaf: leaf[None], values)
        found, by_row = (
            [
                trees.take(of, (replica, slice(len(self.ids))))
                for replica in range(self.replicas or 1)
            ]
            for of in values
        )
        if alone is not None:
            for replicas, theirs in ((found, alone.measured), (by_row, alone.by_row)):
                for replica, measured in enumerate(replicas):
                    reference = theirs[replica if len(theirs) > 1 else 0]
                    for split, models in measured.items():
                        models["local"] = reference[split]["personal"]
        return found, by_row

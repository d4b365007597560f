# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Measuring the models of clients, all of them or a fixed sample.

Pure functions of arrays for one replica, like those of ``rounds``, and ``Evaluation``,
what a run measures on whom.

Where one model serves all clients, it goes over the rows of all of them at once, in
batches that no client's number of rows changes, and states are not read. Elsewhere
clients are measured side by side, in windows of the largest one's rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.batches import everything
from fedblend.core import Algorithm, Down, Key, PyTree, Shard, Wire, shared_model
from fedblend.data.federated import Shards
from fedblend.metrics import Metric, RowByRow, evaluate
from fedblend.simulation.devices import bytes_of
from fedblend.simulation.rounds import Members, Settings, shard_of
from fedblend.stats.gains import Measured

MEASURE_BYTES = 2**28
"""Memory that the rows of clients measured side by side may take."""
CPU_ROWS, ROWS = 512, 2048
"""Rows that a model goes over at once, on a CPU and on anything else."""

Values = dict[str, dict[str, dict[str, jax.Array]]]
"""``{split: {model: {metric: value}}}`` of one client."""


def message_to_deploy(
    algorithm: Algorithm, down: Down, state: PyTree, shard: Shard
) -> Down:
    """The message from which a client makes the model that it uses."""
    if algorithm.needs.whole:
        return down
    return algorithm.wire.tell(down, algorithm.wire.ask(state, shard))


def personal(
    settings: Settings, hyper: Any, root: Key, down: Down, state: PyTree, shard: Shard
) -> PyTree:
    """The model that one client would deploy, from the message and its state."""
    algorithm = settings.build(hyper)
    message = message_to_deploy(algorithm, down, state, shard)
    key = keys.derive(root, "personal", down.round, shard.id)
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
        found = {name: evaluate(metrics, one, batch) for name, one in models.items()}
        if one_for_all:
            found["shared"] = found["personal"]
        numbers[split] = {name: both[0] for name, both in found.items()}
        by_row[split] = {name: both[1] for name, both in found.items()}
    return numbers, by_row


def one_for_all(algorithm: Algorithm) -> bool:
    """Whether every client deploys the very model that the server has."""
    whole = algorithm.needs.whole or algorithm.wire.tell is Wire().tell
    return whole and algorithm.personal is shared_model


def evaluate_rows(
    metrics: Mapping[str, Metric],
    model: PyTree,
    examples: PyTree,
    places: tuple[jax.Array, jax.Array],
    counts: np.ndarray,
    capacity: int,
    replicas: int = 1,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The metrics of one model on the rows of each client, and by rows.

    What ``evaluate`` finds for each of them; but the model goes over the rows of many
    clients in batches of so many at once, without the padding of small clients.

    Args:
        metrics: what to measure, each of them ``RowByRow``.
        model: the model.
        examples: the rows of the split.
        places: where the clients' rows start, and how many there are.
        counts: how many there are, by value.
        capacity: the rows of a client's window.
        replicas: as many of these take the memory at the same time.
    """
    measures: Any = {name: metric.with_rows for name, metric in metrics.items()}
    clients = len(counts)

    def say(index):
        rows = trees.take(examples, index)
        return {name: one.say(model, rows) for name, one in measures.items()}

    def finish(said, client):
        start, count, end = client
        inside = jnp.arange(capacity)
        window = jnp.minimum(inside, jnp.maximum(count - 1, 0))
        rows = trees.take(examples, start + window)
        own = trees.take(said, end - count + window)
        found = {
            name: one.finish(own[name], rows, inside < count)
            for name, one in measures.items()
        }
        return tuple({name: found[name][part] for name in found} for part in (0, 1))

    one_row = jax.eval_shape(say, jnp.zeros(1, int))
    row_bytes = bytes_of(one_row)
    room = max(MEASURE_BYTES // (row_bytes * replicas), 1)
    groups = min(-(-int(counts.sum()) // room), clients) or 1
    group = -(-clients // groups)
    gap = (0, -clients % group)
    total = max(int(np.pad(counts, gap).reshape(-1, group).sum(axis=1).max()), 1)
    pieces = -(-total // (CPU_ROWS if jax.default_backend() == "cpu" else ROWS))
    size = -(-total // pieces)

    def several(of_group):
        starts, counts = of_group
        ends = jnp.cumsum(counts)
        shifts = jnp.repeat(
            starts - (ends - counts), counts, total_repeat_length=pieces * size
        )
        index = shifts + jnp.arange(pieces * size)
        said = jax.lax.map(say, index.reshape(pieces, size))
        said = trees.flat(said, 2)
        side_by_side = min(max(room // capacity, 1), group)
        each = (starts, counts, ends)
        return jax.lax.map(partial(finish, said), each, batch_size=side_by_side)

    grouped = jax.tree.map(lambda leaf: jnp.pad(leaf, gap).reshape(-1, group), places)
    found = jax.lax.map(several, grouped)
    return trees.take(trees.flat(found, 2), slice(clients))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What to measure, on whom.

    ``ids`` are the clients, at least ``most`` of them measured side by side where their
    rows fit; ``one_for_all`` says that they all deploy the server's model.
    """

    metrics: Mapping[str, Metric]
    splits: Mapping[str, Shards]
    ids: np.ndarray
    replicas: int | None
    most: int
    one_for_all: bool = False

    @property
    def counts(self) -> dict[str, np.ndarray]:
        """The measured clients' rows in each split."""
        return {name: split.counts[self.ids] for name, split in self.splits.items()}

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """The numbers of the measured clients' rows in each split, see ``Shards``."""
        return {name: self.splits[name].numbers(self.ids) for name in self.row_splits}

    @property
    def goes_by_rows(self) -> bool:
        """Whether the model of all clients goes over all rows; it reads no states."""
        known = (metric.with_rows for metric in self.metrics.values())
        return self.one_for_all and all(isinstance(of, RowByRow) for of in known)

    @cached_property
    def chunk(self) -> int:
        """Clients measured side by side: as in training, or as many as have ``ROWS``.

        Fewer, if their rows do not fit.
        """
        if self.goes_by_rows:
            return 1
        capacity = max(split.capacity for split in self.splits.values())
        window = max(
            split.capacity * leaf[:1].nbytes
            for split in self.splits.values()
            for leaf in jax.tree.leaves(split.examples)
        )
        fitting = max(MEASURE_BYTES // (window * (self.replicas or 1)), 1)
        wanted = self.most
        if jax.default_backend() != "cpu":
            wanted = max(wanted, ROWS // (capacity * (self.replicas or 1)))
        return int(min(fitting, wanted, len(self.ids)))

    @property
    def chunk_ids(self) -> np.ndarray:
        """The measured clients, some of them again to fill the last chunk."""
        return np.resize(self.ids, len(self.ids) + -len(self.ids) % self.chunk)

    @cached_property
    def places(self) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Where the rows of ``chunk_ids`` start in each split, and how many."""
        ids = self.chunk_ids
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
        are some. States, members and places are those of ``chunk_ids``. Methods whose
        server sends nothing have no shared model to measure.
        """
        if self.goes_by_rows:
            numbers, by_row = {}, {}
            for name, counts in self.counts.items():
                found = evaluate_rows(
                    self.metrics,
                    down.shared,
                    examples[name],
                    places[name],
                    counts,
                    self.splits[name].capacity,
                    self.replicas or 1,
                )
                numbers[name], by_row[name] = (
                    {"personal": one, "shared": one} for one in found
                )
            return numbers, {name: by_row[name] for name in self.row_splits}
        algorithm = settings.build(hyper)
        capacity = {name: split.capacity for name, split in self.splits.items()}

        def one(client):
            state, member, rows = client
            shard = shard_of(settings, examples["train"], member)
            message = algorithm.wire.tell(down, algorithm.wire.ask(state, shard))
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
            return numbers, {split: by_row[split] for split in self.row_splits}

        return jax.lax.map(one, (states, members, places), batch_size=self.chunk)

    @property
    def row_splits(self) -> list[str]:
        """The splits whose rows are kept, to compare models row by row."""
        return [name for name in self.splits if name != "train"] or list(self.splits)

    def split_replicas(
        self, values: PyTree, alone: Sequence[Measured]
    ) -> list[Measured]:
        """What ``measure`` found in each replica: the numbers, or those of rows.

        ``alone`` is that of training alone, if there is any: its personal models are
        every client's alternative to taking part, "local" in the result.
        """
        values = jax.device_get(values)
        if self.replicas is None:
            values = jax.tree.map(lambda leaf: leaf[None], values)
        found = [
            trees.take(values, (replica, slice(len(self.ids))))
            for replica in range(self.replicas or 1)
        ]
        return add_local(found, alone)


def add_local(
    measured: Sequence[Measured], alone: Sequence[Measured]
) -> list[Measured]:
    """What was measured in each replica, with training alone as the model "local".

    ``alone`` has an entry for each replica, one for all of them, or none.
    """
    several = len(alone) > 1
    return [
        {
            split: {**models, "local": alone[several * place][split]["personal"]}
            for split, models in of.items()
        }
        if alone
        else of
        for place, of in enumerate(measured)
    ]

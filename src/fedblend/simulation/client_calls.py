# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Visits to clients outside of rounds: enrollment, measuring, taking out a model.

Pure functions of arrays for one replica, like those of ``rounds``.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedblend import keys
from fedblend.core import Aggregate, Algorithm, Down, Key, PyTree, Shard, shared_model
from fedblend.metrics import Metric, evaluate
from fedblend.shards import everything
from fedblend.simulation import aggregators
from fedblend.simulation.rounds import Members, Settings, shard_of


def strong(tree: PyTree) -> PyTree:
    """The same arrays without weak types, which would cost a second trace."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)


def enroll(
    settings: Settings,
    hyper: Any,
    root: Key,
    params: PyTree,
    examples: PyTree,
    members: Members,
) -> tuple[aggregators.RunningSum, PyTree]:
    """The tally of what a group of clients says first, and their states."""
    algorithm = settings.build(hyper)

    def one(member):
        key = keys.at(root, "enroll", 0, member.ids)
        shard = shard_of(settings, examples, member)
        return strong(algorithm.enroll(params, shard, key))

    join, states = jax.lax.map(one, members, batch_size=settings.chunk)
    shapes = jax.tree.map(lambda leaf: leaf[0], join)
    first = aggregators.empty(shapes)
    running_sum, _ = aggregators.add_to(first, join, members.weights, members.present)
    return running_sum, states


def start(
    settings: Settings,
    hyper: Any,
    root: Key,
    params: PyTree,
    join: Aggregate,
    central: Shard | None,
) -> tuple[Down, PyTree]:
    """The server's first word, and its state."""
    algorithm = settings.build(hyper)
    return strong(algorithm.start(params, join, central, keys.at(root, "start")))


def told_to_deploy(
    algorithm: Algorithm, down: Down, state: PyTree, shard: Shard
) -> Down:
    """The message from which a client makes the model that it uses."""
    if algorithm.needs.whole:
        return down
    return algorithm.tell(down, algorithm.ask(state, shard))


def personal(
    settings: Settings, hyper: Any, root: Key, down: Down, state: PyTree, shard: Shard
) -> PyTree:
    """The model that one client would deploy, from what it is told and remembers."""
    algorithm = settings.build(hyper)
    message = told_to_deploy(algorithm, down, state, shard)
    key = keys.at(root, "personal", down.round, shard.id)
    return algorithm.personal(message, state, shard, key)


def measure(
    settings: Settings,
    metrics: Mapping[str, Metric],
    capacities: Mapping[str, int],
    chunk: int,
    hyper: Any,
    root: Key,
    down: Down,
    states: PyTree,
    examples: Mapping[str, PyTree],
    members: Members,
    rows: Mapping[str, tuple[jax.Array, jax.Array]],
) -> tuple[Any, Any]:
    """Measures of a group of clients: ``{split: {model: {metric: values}}}``.

    Also what each row brings to them, [clients, rows]: of held-out rows where there are
    some. ``rows`` has the clients' starts and counts in each split. Methods whose
    server tells nothing have no shared model to measure.
    """
    algorithm = settings.build(hyper)
    paired = [name for name in capacities if name != "train"] or list(capacities)

    def one(this):
        state, member, places = this
        shard = shard_of(settings, examples["train"], member)
        models = {"personal": personal(settings, hyper, root, down, state, shard)}
        told = algorithm.tell(down, algorithm.ask(state, shard))
        one_for_all = algorithm.personal is shared_model
        if jax.tree.leaves(told.shared) and not one_for_all:
            models["shared"] = down.shared

        def seen(split, capacity):
            start, count = places[split]
            held = Shard(examples[split], start, count, member.ids, capacity)
            batch = everything(held)
            found = {
                name: evaluate(metrics, model, batch) for name, model in models.items()
            }
            return {**found, "shared": found["personal"]} if one_for_all else found

        found = {split: seen(split, room) for split, room in capacities.items()}
        values = {
            split: {model: values for model, (values, _) in models.items()}
            for split, models in found.items()
        }
        brought = {
            split: {model: rows for model, (_, rows) in found[split].items()}
            for split in paired
        }
        return values, brought

    return jax.lax.map(one, (states, members, rows), batch_size=chunk)

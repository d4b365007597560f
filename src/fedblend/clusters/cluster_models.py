# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""One model for every group of clients; see ``clusters``."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.clusters.signatures import Signatures, at_every_client
from fedblend.core import Algorithm, Key, Loss, PyTree
from fedblend.data.federated import FederatedData, Shards
from fedblend.simulation.simulate import simulate


class Clustered(NamedTuple):
    """Models of groups, handed to their members.

    ``models`` are stacked over clients. ``norms`` are those of each client's own full
    gradient at its model; they stay large where a group's members differ. ``bits_up``
    and ``bits_down``, over clients, are those of the signatures, of the groups' runs
    and of the last model, which every member receives.
    """

    models: PyTree
    norms: np.ndarray
    bits_up: np.ndarray
    bits_down: np.ndarray


def train(
    method: Callable[[np.ndarray], Algorithm],
    loss: Loss,
    params: PyTree,
    federated_data: FederatedData,
    assignment: np.ndarray,
    key: Key,
    *,
    rounds: int,
    cohort: int | None = None,
    weights: str | None = None,
    signatures: Signatures | None = None,
) -> Clustered:
    """Train one model in every group, among its members only.

    Args:
        method: from the ids of a group's members to the algorithm that they run; where
            its settings are arrays over clients, take the members' entries.
        loss: for the norms of the members' own gradients.
        params: the initial parameters, of all groups.
        federated_data: the clients' data.
        assignment: the group of each client, from 0, as ``kmeans`` makes it.
        key: the seed; every group has its own.
        rounds: of each group.
        cohort: members of a round at most, all of them if None.
        weights: "by_count" or "uniform"; the algorithm's own choice if None.
        signatures: those of the groups, for their bits.
    """
    assignment = np.asarray(assignment)
    if assignment.shape != (federated_data.clients,):
        raise ValueError(
            f"assignment: shape {assignment.shape} is not that of the "
            f"{federated_data.clients} clients"
        )
    models: list[PyTree] = [None] * federated_data.clients
    before = (0, 0) if signatures is None else signatures[1:]
    up, down = (np.full(federated_data.clients, bits, np.int64) for bits in before)
    for group in np.unique(assignment):
        members = np.flatnonzero(assignment == group)
        run = simulate(
            method(members),
            params,
            _among(federated_data, members),
            keys.at(key, "group", 0, int(group)),
            rounds=rounds,
            every=max(rounds, 1),
            cohort=len(members) if cohort is None else min(cohort, len(members)),
            weights=weights,
        )
        for member in members:
            models[member] = run.shared
        bits = run.bits()
        up[members] += bits.up
        down[members] += bits.down + run.message_bits.down
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    norms = at_every_client(
        loss,
        lambda shard: trees.take(stacked, shard.id),
        lambda slope, shard: jnp.sqrt(trees.squared_norm(slope)),
        federated_data,
    )
    return Clustered(stacked, np.asarray(norms), up, down)


def _among(federated_data: FederatedData, members: np.ndarray) -> FederatedData:
    """The members alone, over the same rows."""
    train = federated_data.train
    shards = Shards(train.examples, train.starts[members], train.counts[members])
    return FederatedData(
        shards, names=tuple(federated_data.name(int(i)) for i in members)
    )

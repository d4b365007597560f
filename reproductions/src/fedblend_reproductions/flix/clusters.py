# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Local models from clusters of clients, for clients with too few rows of their own.

The authors of FLIX propose to group similar clients and to let each group train one
model, which then serves as x_i of all its members::

    signature   s_i <- a few numbers that client i computes on its own rows
    groups      k-means of all s_i, at the server
    models      every group trains one model, by any method, among its members only
    result      x_i <- the model of the group of client i, for ``solvers.given``

What leaves a client: its signature, once, which the server sees individually, so that
secure aggregation does not hide it; then the messages of an ordinary federated run
within its group. The signature is one of

``gradient_signatures``
    ``size`` numbers: the direction of the full local gradient at the initial model,
    projected on as many random axes, the same for all clients. With ``size`` equal to
    the number of parameters the signature reveals the whole gradient, from which single
    rows may be reconstructed.
``label_signatures``
    as many numbers as there are classes: the share of each, and nothing else.

No noise is added: neither signature is differentially private.

x_i of a group minimizes the group's loss and not f_i: bounds that need minimizers, such
as those of ``theory.bounds``, do not hold for it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedblend import keys, trees
from fedblend.batches import everything
from fedblend.checks import COUNT, FUNCTION, gate
from fedblend.core import Algorithm, Key, Loss, PyTree, Shard, static_bits
from fedblend.data.federated import FEDERATED_DATA, FederatedData
from fedblend.losses import gradient
from fedblend.simulation.simulate import simulate
from fedblend_reproductions.clients import map_clients


class Signatures(NamedTuple):
    """``values`` [clients, size]; ``bits_up`` and ``bits_down`` of one client."""

    values: np.ndarray
    bits_up: int
    bits_down: int


@gate(loss=FUNCTION, federated_data=FEDERATED_DATA, size=COUNT)
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
        params: the model at which all clients take their gradient.
        federated_data: the clients' data.
        key: of the random projection, the same for all clients.
        size: numbers of a signature, at most one for each parameter. A client sends
            these numbers and receives ``params``.
    """
    dim = trees.size(params)
    size = min(size, dim)
    normal = jax.random.normal(keys.named(key, "signature"), (dim, size), jnp.float32)
    axes, _ = jnp.linalg.qr(normal)

    def project(gradient, shard):
        del shard
        vector, _ = trees.ravel(gradient)
        length = jnp.linalg.norm(vector)
        direction = vector / jnp.where(length > 0, length, 1)
        return np.sqrt(dim / size) * (direction @ axes.astype(vector.dtype))

    values = np.asarray(
        _map_gradients(loss, lambda shard: params, project, federated_data)
    )
    return Signatures(values, static_bits(values[0]), static_bits(params))


@gate(federated_data=FEDERATED_DATA, classes=COUNT)
def label_signatures(federated_data: FederatedData, classes: int) -> Signatures:
    """The share of each class among every client's rows ``(inputs, labels)``."""
    labels = [
        federated_data.train.rows(client)[1] for client in range(federated_data.clients)
    ]
    shares = [np.bincount(own, minlength=classes) / len(own) for own in labels]
    values = np.stack(shares).astype(np.float32)
    return Signatures(values, static_bits(values[0]), 0)


def _map_gradients(
    loss: Loss,
    model_of: Callable[[Shard], PyTree],
    function: Callable[[PyTree, Shard], jax.Array],
    federated_data: FederatedData,
) -> jax.Array:
    """``function(gradient, shard)`` of every client's full gradient at its model."""
    gradient_at = gradient(loss)

    def of_client(shard: Shard) -> jax.Array:
        return function(gradient_at(model_of(shard), everything(shard)), shard)

    return map_clients(of_client, federated_data.train)


class Groups(NamedTuple):
    """The group of each client, numbered in the order of their first members.

    ``inertia`` is the sum of squared distances to the groups' means.
    """

    assignment: np.ndarray
    inertia: float


@gate(k=COUNT, restarts=COUNT, steps=COUNT)
def kmeans(
    points: np.ndarray, k: int, key: Key, *, restarts: int = 10, steps: int = 100
) -> Groups:
    """k-means: the best of several runs of Lloyd's algorithm from k-means++ starts.

    No group is empty: one that would be takes the client farthest from its center.

    Args:
        points: one row for every client, the ``values`` of signatures.
        k: how many groups.
        key: of the initial centers.
        restarts: runs, of which the one with the least inertia counts.
        steps: at most this many of a run; it stops when no client changes its group.

    Reference: Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding",
    SODA 2007.
    """
    points = np.asarray(points, np.float64)
    if not 1 <= k <= len(points):
        raise ValueError(f"k: {k} is not between 1 and the {len(points)} clients")
    words = np.asarray(jax.random.key_data(keys.named(key, "k-means")))
    tries = (
        _lloyd(points, _centers(points, k, np.random.default_rng([*words, i])), steps)
        for i in range(restarts)
    )
    best = min(tries, key=lambda groups: groups.inertia)
    _, firsts = np.unique(best.assignment, return_index=True)
    ranks = np.argsort(np.argsort(firsts))
    return best._replace(assignment=ranks[best.assignment])


def _squared_distances(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    return np.square(points[:, None] - centers[None]).sum(axis=2)


def _centers(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Initial centers of k-means++: drawn by squared distance to the centers so far.

    Of a few such draws the one that leaves the least distance wins.
    """
    chosen = [int(rng.integers(len(points)))]
    away = _squared_distances(points, points[chosen])[:, 0]
    while len(chosen) < k:
        chance = away / away.sum() if away.sum() > 0 else None
        drawn = rng.choice(len(points), 2 + int(np.log(k)), p=chance)
        left = np.minimum(away[:, None], _squared_distances(points, points[drawn]))
        best = left.sum(axis=0).argmin()
        chosen.append(int(drawn[best]))
        away = left[:, best]
    return points[chosen]


def _lloyd(points: np.ndarray, centers: np.ndarray, steps: int) -> Groups:
    """Clients join the nearest center, centers move to their means, until all stay."""
    k, before = len(centers), None
    for _ in range(steps):
        distances = _squared_distances(points, centers)
        assignment = distances.argmin(axis=1)
        nearest = distances.min(axis=1)
        for empty in np.flatnonzero(np.bincount(assignment, minlength=k) == 0):
            crowded = np.bincount(assignment, minlength=k)[assignment] > 1
            moved = np.where(crowded, nearest, -1).argmax()
            assignment[moved], nearest[moved] = empty, 0
        centers = np.stack([points[assignment == c].mean(axis=0) for c in range(k)])
        if before is not None and np.array_equal(assignment, before):
            break
        before = assignment
    return Groups(assignment, float(np.square(points - centers[assignment]).sum()))


class Clustered(NamedTuple):
    """The models of the groups, one for each client.

    ``models`` are stacked over clients. ``norms`` are those of each client's own full
    gradient at its model; they stay large where a group's members differ. ``bits_up``
    and ``bits_down`` [clients] count the signatures, the groups' runs and the final
    model, which every member receives.
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
        params: the initial parameters of all groups.
        federated_data: the clients' data.
        assignment: the group of each client, from 0, as ``kmeans`` makes it.
        key: the seed; every group has its own.
        rounds: of each group.
        cohort: members of a round, at most; all of them if None.
        weights: "by_count" or "uniform"; the algorithm's own choice if None.
        signatures: those of the groups, for their bits.
    """
    assignment = np.asarray(assignment)
    if assignment.shape != (federated_data.clients,):
        raise ValueError(
            f"assignment: shape {assignment.shape} is not that of the "
            f"{federated_data.clients} clients"
        )
    training = FederatedData(federated_data.train, names=federated_data.names)
    models: list[PyTree] = [None] * federated_data.clients
    before = (0, 0) if signatures is None else signatures[1:]
    up, down = (np.full(federated_data.clients, bits, np.int64) for bits in before)
    for group in np.unique(assignment):
        members = np.flatnonzero(assignment == group)
        run = simulate(
            method(members),
            params,
            training.select(members.tolist()),
            keys.derive(key, "group", 0, int(group)),
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
    norms = _map_gradients(
        loss,
        lambda shard: trees.take(stacked, shard.id),
        lambda gradient, shard: trees.norm(gradient),
        federated_data,
    )
    return Clustered(stacked, np.asarray(norms), up, down)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Digits of two kinds: clients have two of 0 to 4 each, the server has 5 to 9."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.core import Loss, PyTree
from fedblend.data.federated import Shards
from fedblend.transforms import central_loss

RATE, STEPS, BATCH, L2 = 0.1, 5, 10, 1e-3
WEIGHTS = (0.5, 0.5)


class Digits(NamedTuple):
    """Clients, their own test rows and the server's for validation; what is learned."""

    federated_data: fb.FederatedData
    held: PyTree
    loss: Loss
    params: PyTree
    accuracy: Any
    cohort: int


def digits(quick: bool) -> Digits:
    """MNIST at half its resolution, or the small digits of scikit-learn."""
    source = fb.datasets.load("digits" if quick else "mnist")
    clients, each, cohort = (6, 40, 3) if quick else (50, 60, 10)
    images, labels = source.rows
    if not quick:
        images = images.reshape(-1, 14, 2, 14, 2, 1).mean(axis=(2, 4))
    low = np.flatnonzero(labels < 5)
    partition = fb.partition.classes_per_client(labels[low], clients, 2)
    parts = [low[index][:each] for index in partition]
    federated_data = fb.federate((images, labels), parts, test=0.5)
    high = np.random.default_rng(0).permutation(np.flatnonzero(labels >= 5))[:1000]
    held, tested = (
        (images[rows], labels[rows]) for rows in np.split(high, [len(high) // 2])
    )
    count = len(tested[1])
    apart = Shards(tested, np.zeros(clients, int), np.full(clients, count))
    model = fb.models.build("softmax", images.shape[1:], 10)
    return Digits(
        fb.FederatedData(federated_data.train, apart, federated_data.test),
        held,
        fb.losses.l2(fb.losses.cross_entropy(model.apply), L2),
        jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0))),
        fb.metrics.accuracy(model.apply),
        cohort,
    )


def personal(loss: Loss, name: str, alpha: Any) -> fb.Algorithm:
    """FLIX or APFL, with the same weight of the shared model for all clients."""
    work: Any = {"steps": STEPS, "batch_size": BATCH}
    if name == "apfl":
        return fb.apfl(loss, fb.Work(RATE, **work), alpha=alpha, learn="fixed")
    local = fb.solvers.lbfgs(loss, tolerance=1e-3, most=200)
    return fb.flix(
        loss,
        lambda mixed: fb.fedavg(mixed, fb.Work(RATE, **work)),
        alpha=alpha,
        local=local,
    )


def accuracies(
    of: Digits, name: str, mixed: bool, alphas: Any, seeds: int, rounds: int
) -> dict[str, np.ndarray]:
    """``[seeds, alphas]`` at the end: deployed models on clients' own rows and on the
    server's digits, and the shared model there.
    """
    server = central_loss.row_loss(of.loss, 100)

    def build(alpha):
        inner = personal(of.loss, name, alpha)
        if not mixed:
            return inner
        return fb.transforms.mixed_fl(inner, server, how="one_way", weights=WEIGHTS)

    run = fb.simulate(
        build,
        of.params,
        of.federated_data,
        jax.vmap(jax.random.key)(jnp.tile(jnp.arange(seeds), len(alphas))),
        rounds=rounds,
        every=rounds,
        cohort=of.cohort,
        central=fb.shard_of(of.held) if mixed else None,
        over=jnp.repeat(jnp.asarray(alphas, jnp.float32), seeds),
        measure={"accuracy": of.accuracy},
        splits=("validation", "test"),
    ).complete()

    def read(split: str, model: str) -> np.ndarray:
        means = [one.measures[split][model]["accuracy"].mean for one in run.records[-1]]
        return np.reshape(means, (len(alphas), seeds)).T

    return {
        "own rows, deployed": read("test", "personal"),
        "server's digits, deployed": read("validation", "personal"),
        "server's digits, shared": read("validation", "shared"),
    }

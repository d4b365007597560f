# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Rules that give every client an alpha, run on MNIST.

Clients differ in their classes and in how many rows they have, by a Dirichlet
distribution, so that the bound distinguishes them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.data.partition import federate_dataset
from fedblend_reproductions.apfl import generalization
from fedblend_reproductions.apfl.runs import decaying
from fedblend_reproductions.apfl.tune_alpha import tune
from fedblend_reproductions.flix.clusters import label_signatures

CONSTANTS = (0.01, 0.1, 1.0)
"""Values of the constant C, which the theorem leaves open."""
BOUNDS = tuple(f"bound, C = {constant:g}" for constant in CONSTANTS)
RATE, HELD_OUT, ALPHA_RATE = 0.1, 0.2, 0.01
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
CLASSES = 10
OWN = "tuned, each its own"


class Draw:
    """A partition of rows among clients, and APFL trained on it.

    Args:
        quick: small sizes.
        concentration: of the Dirichlet distribution.
        draw: the seed of the partition and of all runs.
    """

    def __init__(self, quick: bool, concentration: float, draw: int) -> None:
        self.clients, rows, self.rounds = (6, 400, 10) if quick else (30, 4000, 60)
        mnist = fb.datasets.load("mnist")
        images, labels = mnist.rows
        chosen = np.random.default_rng(draw).permutation(len(labels))[:rows]
        mnist = mnist._replace(rows=(images[chosen], labels[chosen]))
        partition = fb.partition.dirichlet(
            mnist.rows[1],
            self.clients,
            concentration=concentration,
            minimum=20,
            seed=draw,
        )
        self.federated_data = federate_dataset(
            mnist, partition, validation=0.2, test=0.3, seed=draw
        )
        self.model = fb.models.softmax(784, CLASSES)
        self.loss = fb.losses.cross_entropy(self.model.apply)
        self.accuracy = {"accuracy": fb.metrics.accuracy(self.model.apply)}
        self.key = jax.random.key(draw)

    def apfl(self, alpha, **options) -> fb.Algorithm:
        """APFL with fixed alpha, or with these options."""
        work = fb.Work(decaying(RATE), steps=10, batch_size=20)
        return fb.apfl(self.loss, work, alpha=alpha, **{"learn": "fixed", **options})

    def trained(self, build, over=None) -> Any:
        """A finished run, measured at its end."""
        return fb.simulate(
            build,
            self.model.init,
            self.federated_data,
            self.key,
            rounds=self.rounds,
            every=self.rounds,
            measure=self.accuracy,
            splits=["validation", "test"],
            over=over,
        ).complete()


def same_for_all(quick: bool, concentration: float, draw: int, alphas: Any) -> Any:
    """Test accuracies over clients if all have the mean of the bound's alphas.

    Args:
        quick: see ``Draw``, as the next two.
        concentration: of the Dirichlet distribution.
        draw: the seed.
        alphas: of every rule.
    """
    this = Draw(quick, concentration, draw)
    means = [np.mean(alphas[rule]) for rule in BOUNDS]
    run = this.trained(this.apfl, jnp.asarray(means, jnp.float32))
    tests = [measured["test"]["personal"]["accuracy"] for measured in run.measured]
    return dict(zip(BOUNDS, tests, strict=True))


def of_draw(quick: bool, concentration: float, draw: int) -> dict[str, Any]:
    """The alphas and test accuracies of every rule, for one partition."""
    this = Draw(quick, concentration, draw)
    clients, model, federated_data = this.clients, this.model, this.federated_data
    loss, apfl, trained = this.loss, this.apfl, this.trained
    tuned = tune(
        apfl,
        model.init,
        federated_data,
        this.key,
        rounds=this.rounds,
        alphas=GRID,
        measure={"loss": fb.metrics.mean_loss(loss), **this.accuracy},
    )
    tests = np.stack([m["test"]["personal"]["accuracy"] for m in tuned.run.measured])
    common = int(np.searchsorted(tuned.alphas, tuned.common))
    everybody = np.arange(clients)
    found = {
        OWN: (tuned.chosen, tests[tuned.replicas, everybody]),
        "tuned, one for all": (np.full(clients, tuned.common), tests[common]),
        "fixed at 0.5": (np.full(clients, 0.5), tests[2]),
        "alone": (np.zeros(clients), tests[0]),
        "FedAvg": (np.ones(clients), tests[-1]),
    }
    for name, share in {"learned": 0.0, "learned on held-out rows": HELD_OUT}.items():
        options = {"learn": "step", "alpha_rate": ALPHA_RATE, "held_out": share}
        run = trained(apfl(0.5, **options))
        alphas = run.info()["alpha"]
        found[name] = (alphas, run.measured[0]["test"]["personal"]["accuracy"])
    by_bound = np.stack(
        [_sides(tuned.run, loss, model, federated_data, C).alpha for C in CONSTANTS]
    )
    run = trained(apfl, jnp.asarray(by_bound, jnp.float32))
    chances = {}
    for name, alphas, measured in zip(BOUNDS, by_bound, run.measured, strict=True):
        found[name] = (alphas, measured["test"]["personal"]["accuracy"])
        chances[name] = np.nanmean(measured["validation"]["personal"]["accuracy"])
    return {
        "alphas": {name: alphas for name, (alphas, _) in found.items()},
        "accuracies": {name: values for name, (_, values) in found.items()},
        "validation": chances,
        "counts": federated_data.train.counts,
    }


def _sides(run, loss, model, federated_data, constant) -> generalization.Sides:
    """Both sides of the bound, from the replicas with alpha 1 and alpha 0."""
    own = [
        jax.tree.map(lambda leaf: leaf[0], run.personal(client))
        for client in range(federated_data.clients)
    ]
    shares = label_signatures(federated_data, CLASSES).values
    shared = jax.tree.map(lambda leaf: leaf[0], run.shared)
    return generalization.plug_in(
        loss,
        model.apply,
        federated_data,
        shared,
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *own),
        distance=generalization.label_distances(shares),
        dimension=fb.trees.size(shared),
        largest=float(np.log(CLASSES)),
        constant=constant,
        lipschitz=0.0,
    )

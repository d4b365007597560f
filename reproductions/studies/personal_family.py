# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedEM, HypCluster, FedALA, FedDBE and kNN-Per beside FedAvg and local training.

python personal_family.py [--rounds 60] [--seeds 3]

Digits, 20 clients with three classes each, a perceptron of 32, test rows of every
client. Every method has the rate, of three, with the best mean on validation rows.
Prints the mean and the worst tenth of clients over seeds, in percent.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend_reproductions import feddbe as dbe
from fedblend_reproductions import knn_per as knn

RATES = (0.05, 0.2, 0.5)
CLIENTS, WIDTH = 20, 32
NETWORK = fb.models.mlp(64, 10, hidden=(WIDTH,))
THREE = fb.models.ensemble(NETWORK, 3)
NEAR = knn.neighbors(NETWORK)
SHIFTED = dbe.shifted(NETWORK, (8, 8, 1))


def finetuned(loss, work):
    """FedAvg, then ten local steps."""
    return fb.finetune(fb.fedavg(loss, work), loss, work)


def fedala(loss, work):
    """With weights for the last layer."""
    return fb.algorithms.fedala(loss, work, head=["last"])


def feddbe(loss, work):
    """With the strength 1."""
    features = SHIFTED.features
    assert features is not None
    return dbe.feddbe(loss, work, features=features, kappa=1.0)


def knn_per(loss, work):
    """FedAvg, beside the ten nearest rows."""
    features = NEAR.features
    assert features is not None
    return knn.knn_per(fb.fedavg(loss, work), loss, features=features)


def sharp_knn_per(loss, work):
    """The same, with votes that fall faster with the distance."""
    features = NEAR.features
    assert features is not None
    return knn.knn_per(fb.fedavg(loss, work), loss, features=features, scale=0.1)


METHODS: dict[str, tuple[Callable, fb.Model]] = {
    "local": (fb.local_only, NETWORK),
    "fedavg": (fb.fedavg, NETWORK),
    "fine-tuned": (finetuned, NETWORK),
    "fedala": (fedala, NETWORK),
    "feddbe": (feddbe, SHIFTED),
    "knn_per": (knn_per, NEAR),
    "scale 0.1": (sharp_knn_per, NEAR),
    "hypcluster": (fb.algorithms.hypcluster, THREE),
    "fedem": (fb.algorithms.fedem, THREE),
}


def accuracies(name: str, data, rounds: int, seed: int) -> np.ndarray:
    """Test accuracy of every client, at the rate with the best validation accuracy."""
    build, model = METHODS[name]
    loss = fb.losses.cross_entropy(model.apply)
    run = fb.simulate(
        lambda rate: build(loss, fb.Work(rate, steps=10, batch_size=10)),
        model.init,
        data,
        jax.random.key(seed),
        rounds=rounds,
        every=rounds,
        over=jnp.asarray(RATES),
        measure={"accuracy": fb.metrics.accuracy(model.apply)},
        splits=["validation", "test"],
    ).complete()
    measured = [
        {split: of["personal"]["accuracy"] for split, of in one.items()}
        for one in run.evidence.measured
    ]
    best = max(measured, key=lambda one: np.mean(one["validation"]))
    return np.asarray(best["test"])


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    digits = fb.datasets.load("digits")
    parts = fb.partition.classes_per_client(digits.rows[1], CLIENTS, classes=3)
    print(f"{'':10} mean  +-    worst tenth")
    for name in METHODS:
        found = []
        for seed in range(asked.seeds):
            data = fb.federate(
                digits.rows, parts, validation=0.2, test=0.4, seed=0, split=seed
            )
            found.append(np.sort(accuracies(name, data, asked.rounds, seed)))
        each = 100 * np.array(found)
        means, worst = each.mean(axis=1), each[:, : CLIENTS // 10].mean(axis=1)
        print(f"{name:10} {means.mean():5.2f} {means.std():4.2f} {worst.mean():6.2f}")


if __name__ == "__main__":
    main()

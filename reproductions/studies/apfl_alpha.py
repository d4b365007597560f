# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What alpha does in APFL: the table of docs/apfl.md, on digits, five seeds."""

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb

CLIENTS, SEEDS, ROUNDS = 20, 5, 60
WAYS = {
    "fixed at 0.5": {"learn": "fixed"},
    "learned, rate 0.1": {"alpha_rate": 0.1},
    "learned, rate 0.01": {"alpha_rate": 0.01},
    "on held-out rows, rate 0.1": {"alpha_rate": 0.1, "held_out": 0.2},
    "on held-out rows, rate 0.01": {"alpha_rate": 0.01, "held_out": 0.2},
}


def measured(loss, model, federated_data, way):
    """Accuracies over seeds, and alpha over clients and seeds."""
    algorithm = fb.apfl(loss, fb.Work(0.1, steps=10, batch_size=10), alpha=0.5, **way)
    run = fb.simulate(
        algorithm,
        model.init,
        federated_data,
        jax.vmap(jax.random.key)(jnp.arange(SEEDS)),
        rounds=ROUNDS,
        cohort=10,
        every=ROUNDS,
        splits=["test"],
        measure={"accuracy": fb.metrics.accuracy(model.apply)},
    ).complete()
    accuracies = [
        replica["measures"]["test"]["personal"]["accuracy"]["mean"]
        for replica in run.summary()
    ]
    return accuracies, np.array([run.client(i).alpha for i in range(CLIENTS)])


def main():
    digits = fb.datasets.load("digits")
    labels = digits.rows[1]
    model = fb.models.build("softmax", (8, 8, 1), digits.outputs)
    loss = fb.losses.cross_entropy(model.apply)
    splits = {
        "three classes": fb.partition.classes_per_client(labels, CLIENTS, classes=3),
        "IID": fb.partition.iid(len(labels), CLIENTS, 0),
    }
    for split, parts in splits.items():
        federated_data = fb.federate(digits.rows, parts, test=0.3)
        for name, way in WAYS.items():
            accuracies, alpha = measured(loss, model, federated_data, way)
            print(
                f"{split:14} {name:28} accuracy {np.mean(accuracies):.3f} deviation "
                f"{np.std(accuracies):.3f} alpha {alpha.min():.2f} to {alpha.max():.2f}"
            )


if __name__ == "__main__":
    main()

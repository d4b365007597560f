# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to choose alpha, compared: the table of docs/alpha.md, on digits, five seeds.

Every seed shares the rows out anew. All ways train APFL on the same rows; validation
rows are looked at by those that choose on them, test rows by none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend_reproductions.apfl import generalization
from fedblend_reproductions.apfl.tune_alpha import choose, tune
from fedblend_reproductions.flix.clusters import label_signatures

CLIENTS, SEEDS, ROUNDS, CLASSES = 20, 5, 60, 10
WORK = {"steps": 10, "batch_size": 10}


def federations(digits, seed):
    """Three classes a client, and alike clients."""
    labels = digits.rows[1]
    splits = {
        "three classes": fb.partition.classes_per_client(
            labels, CLIENTS, classes=3, seed=seed
        ),
        "IID": fb.partition.iid(len(labels), CLIENTS, seed),
    }
    return {
        name: fb.federate(digits.rows, parts, validation=0.2, test=0.3, seed=seed)
        for name, parts in splits.items()
    }


def outcomes(model, federated_data, seed):
    """Test accuracy and mean alpha of every way."""
    loss = fb.losses.cross_entropy(model.apply)
    common: dict[str, Any] = {"rounds": ROUNDS, "cohort": 10}
    accuracy = {"accuracy": fb.metrics.accuracy(model.apply)}
    both = {"loss": fb.metrics.mean_loss(loss), **accuracy}
    key = jax.random.key(seed)

    def apfl(alpha, **way):
        return fb.apfl(
            loss, fb.Work(0.1, **WORK), alpha=alpha, **{"learn": "fixed", **way}
        )

    def trained(algorithm):
        return fb.simulate(
            algorithm,
            model.init,
            federated_data,
            key,
            measure=accuracy,
            splits=["test"],
            every=ROUNDS,
            **common,
        ).complete()

    def reached(run):
        return run.summary()["measures"]["test"]["personal"]["accuracy"]["mean"]

    by_loss = tune(
        apfl, model.init, federated_data, key, measure=both, by="loss", **common
    )
    run, grid = by_loss.run, by_loss.alphas
    found = {}
    tests = np.stack([m["test"]["personal"]["accuracy"] for m in run.measured])
    for replica in (0, 2, 4):
        found[f"fixed at {grid[replica]:g}"] = tests[replica].mean(), grid[replica]
    for metric, higher in (("loss", False), ("accuracy", True)):
        values = np.stack([m["validation"]["personal"][metric] for m in run.measured])
        replicas, best = choose(values, higher)
        own = tests[replicas, np.arange(CLIENTS)]
        found[f"one for all, by {metric}"] = tests[best].mean(), grid[best]
        found[f"its own, by {metric}"] = own.mean(), grid[replicas].mean()
    for name, way in {
        "learned on training rows": {},
        "learned on held-out rows": {"held_out": 0.2},
    }.items():
        done = trained(apfl(0.5, learn="step", alpha_rate=0.01, **way))
        alphas = [done.client(i).alpha for i in range(CLIENTS)]
        found[name] = reached(done), np.mean(alphas)
    shared = jax.tree.map(lambda leaf: leaf[0], run.shared)
    alone = [jax.tree.map(lambda x: x[0], run.personal(i)) for i in range(CLIENTS)]
    distance = generalization.label_distances(
        label_signatures(federated_data, CLASSES).values
    )
    for constant in (0.01, 0.1, 1.0):
        sides = generalization.plug_in(
            loss,
            model.apply,
            federated_data,
            shared,
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone),
            distance=distance,
            dimension=650,
            largest=float(np.log(CLASSES)),
            constant=constant,
            lipschitz=0.0,
        )
        done = trained(apfl(sides.alpha))
        found[f"bound, C = {constant:g}"] = reached(done), sides.alpha.mean()
    return found


def main():
    digits = fb.datasets.load("digits")
    model = fb.models.build("softmax", (8, 8, 1), digits.outputs)
    seen = {}
    for seed in range(SEEDS):
        for split, federated_data in federations(digits, seed).items():
            for name, pair in outcomes(model, federated_data, seed).items():
                seen.setdefault((split, name), []).append(pair)
    for (split, name), pairs in seen.items():
        accuracy, alpha = np.array(pairs, float).T
        print(
            f"{split:14} {name:28} accuracy {accuracy.mean():.3f} deviation "
            f"{accuracy.std():.3f} alpha {alpha.mean():.2f}"
        )


if __name__ == "__main__":
    main()

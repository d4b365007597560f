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
from fedblend.runtime.tuning import choose
from fedblend.theory import generalisation

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


def outcomes(model, federation, seed):
    """Test accuracy and mean alpha of every way."""
    loss = fb.objectives.cross_entropy(model.apply)
    common: dict[str, Any] = {"rounds": ROUNDS, "cohort": 10}
    accuracy = {"accuracy": fb.metrics.accuracy(model.apply)}
    both = {"loss": fb.metrics.mean_loss(loss), **accuracy}
    key = jax.random.key(seed)

    def apfl(alpha, **way):
        return fb.apfl(loss, 0.1, alpha=alpha, **{"learn": "fixed", **WORK, **way})

    def trained(algorithm):
        return fb.simulate(
            *(algorithm, model.init, federation, key),
            measure=accuracy,
            splits=["test"],
            every=ROUNDS,
            **common,
        ).complete()

    def reached(run):
        return run.summary()["measures"]["test"]["personal"]["accuracy"]["mean"]

    by_loss = fb.tune(
        apfl, model.init, federation, key, measure=both, by="loss", **common
    )
    run, grid = by_loss.run, by_loss.alphas
    found = {}
    tests = np.stack([m["test"]["personal"]["accuracy"] for m in run.measured])
    for lane in (0, 2, 4):
        found[f"fixed at {grid[lane]:g}"] = tests[lane].mean(), grid[lane]
    for metric, higher in (("loss", False), ("accuracy", True)):
        values = np.stack([m["validation"]["personal"][metric] for m in run.measured])
        lanes, best = choose(values, higher)
        own = tests[lanes, np.arange(CLIENTS)]
        found[f"one for all, by {metric}"] = tests[best].mean(), grid[best]
        found[f"its own, by {metric}"] = own.mean(), grid[lanes].mean()
    for name, way in {
        "learnt on training rows": {},
        "learnt on held-out rows": {"held_out": 0.2},
    }.items():
        done = trained(apfl(0.5, learn="step", alpha_rate=0.01, **way))
        alphas = [done.client(i).alpha for i in range(CLIENTS)]
        found[name] = reached(done), np.mean(alphas)
    shared = jax.tree.map(lambda leaf: leaf[0], run.shared)
    alone = [jax.tree.map(lambda x: x[0], run.personal(i)) for i in range(CLIENTS)]
    distance = generalisation.label_distances(
        fb.clusters.label_signatures(federation, CLASSES).values
    )
    for constant in (0.01, 0.1, 1.0):
        sides = generalisation.plug_in(
            *(loss, model.apply, federation, shared),
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
    digits = fb.sources.load("digits")
    model = fb.models.build("softmax", (8, 8, 1), digits.outputs)
    seen = {}
    for seed in range(SEEDS):
        for split, federation in federations(digits, seed).items():
            for name, pair in outcomes(model, federation, seed).items():
                seen.setdefault((split, name), []).append(pair)
    for (split, name), pairs in seen.items():
        accuracy, alpha = np.array(pairs, float).T
        print(
            f"{split:14} {name:28} accuracy {accuracy.mean():.3f} deviation "
            f"{accuracy.std():.3f} alpha {alpha.mean():.2f}"
        )


if __name__ == "__main__":
    main()

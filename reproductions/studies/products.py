# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What products in bfloat16 do to the accuracy of federated training.

FedAvg on scikit-learn's digits (8x8), 20 clients by Dirichlet(0.5), the network of
``large_cnn``, 5 seeds side by side, the last fifth of the rows as test. Every line has
the test accuracy of the shared model after the last round, mean and standard deviation
over the seeds, and the mean of the paired differences to JAX's own products. A CPU
rounds to bfloat16 as a GPU does, so this needs no GPU; time is not measured.

    PYTHONPATH=src python products.py
"""

import argparse
import json

import jax
import numpy as np

import fedblend as fb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    inputs, labels = map(np.asarray, fb.datasets.digits().rows)
    order = np.random.default_rng(0).permutation(len(labels))
    inputs, labels = inputs[order].astype(np.float32), labels[order]
    held = len(labels) // 5
    parts = fb.partition.dirichlet(labels[held:], 20, 0.5, seed=0)
    data = fb.federate((inputs[held:], labels[held:]), parts)
    keys = jax.random.split(jax.random.key(0), given.seeds)
    base = None
    for products in (None, "bfloat16"):
        model = fb.models.large_cnn((8, 8), 10)
        if products is not None:
            model = fb.models.set_products(model, products)
        loss = fb.losses.cross_entropy(model.apply)
        work = fb.Work(0.05, steps=10, batch_size=20)
        run = fb.simulate(
            fb.fedavg(loss, work), model.init, data, keys, rounds=given.rounds
        )
        for _ in run:
            pass
        scores = jax.jit(jax.vmap(model.apply, (0, None)))(run.shared, inputs[:held])
        found = (np.asarray(scores).argmax(-1) == labels[:held]).mean(axis=1)
        base = found if base is None else base
        print(
            json.dumps(
                {
                    "products": products or "default",
                    "accuracy": round(float(found.mean()), 4),
                    "deviation": round(float(found.std(ddof=1)), 4),
                    "difference": round(float((found - base).mean()), 4),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()

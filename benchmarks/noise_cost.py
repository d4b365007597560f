# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A private round with noise from the operating system beside one from the seed.

Ten clients take one step each, with a linear model of 650 weights and a network of 1.6
million. Both kinds of run alternate, and the quickest block of each counts.
"""

import time

import jax
import numpy as np

import fedblend as fb

CLIENTS, ROUNDS, BLOCKS = 10, 5, 5


def runs(model, federated_data):
    """Runs with either noise, after the first block, which compiles."""
    loss = fb.losses.cross_entropy(model.apply)
    plain = fb.fedavg(loss, fb.Work(0.1, steps=1, batch_size=32))
    for source in ("seed", "system"):
        private = fb.transforms.dp_fedavg(
            plain, clip=0.5, noise=1.0, cohort=CLIENTS, noise_from=source
        )
        run = fb.simulate(
            private,
            model.init,
            federated_data,
            jax.random.key(0),
            rounds=ROUNDS * BLOCKS,
            every=ROUNDS,
        )
        blocks = iter(run)
        next(blocks)
        next(blocks)
        yield blocks


def main() -> None:
    digits = fb.datasets.load("digits")
    parts = fb.partition.iid(len(digits.rows[1]), CLIENTS)
    federated_data = fb.federate(digits.rows, parts, test=0.2)
    for name, options in (("softmax", {}), ("mlp", {"hidden": (1210, 1210)})):
        model = fb.models.build(name, (8, 8, 1), digits.outputs, **options)
        weights = sum(
            leaf.size
            for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
        )
        pair, seconds = list(runs(model, federated_data)), []
        for _ in range(BLOCKS - 1):
            seconds.append([])
            for blocks in pair:
                begun = time.perf_counter()
                next(blocks)
                seconds[-1].append((time.perf_counter() - begun) / ROUNDS)
        seed, system = np.min(seconds, axis=0)
        print(
            f"{weights} weights: {1e3 * seed:.2f} ms a round from the seed, "
            f"{1e3 * system:.2f} ms from the system, {system / seed:.2f} times"
        )


if __name__ == "__main__":
    main()

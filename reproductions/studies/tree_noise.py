# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""DP-FTRL beside independent noise at equal epsilon: the figures of docs/privacy.md.

Clients are dealt alike for both, so that neither counts on sampling. On digits the
example of that page over ten seeds; on quadratics the gap to the optimum over twenty,
with BLT noise as well. ``correlated_noise.py`` has BLT noise on digits and FEMNIST.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb
from fedblend.theory import blt
from fedblend_reproductions.dp_ftrl import dp_ftrl, tree_cost

BLT = 0
"""In place of a tree: BLT noise for one part in 64 rounds."""
NAMES = {1: "independent noise", BLT: "BLT noise"}
STRATEGY = blt.optimal(rounds=64, separation=64)


def noised(algorithm, tree: int, noise: float, clip: float, cohort: int):
    """With trees of so many rounds, or noise of its own in every round if it is one."""
    settings: dict[str, Any] = {"clip": clip, "noise": noise, "cohort": cohort}
    if tree > 1:
        return dp_ftrl(algorithm, **settings, tree=tree)
    settings["noise_from"] = "seed"  # the figures are the same again
    if tree == BLT:
        return fb.transforms.dp_blt(algorithm, **settings, strategy=STRATEGY)
    return fb.transforms.dp_fedavg(algorithm, **settings)


def equal_noise(tree: int, alone: float) -> float:
    """A client is in so many nodes of a tree as its size has binary digits."""
    if tree == BLT:
        return alone * blt.sensitivity(STRATEGY, 64, 64)
    return alone * tree.bit_length() ** 0.5


def keys(count: int) -> jax.Array:
    return jnp.stack([jax.random.key(seed) for seed in range(count)])


def on_digits() -> None:
    digits = fb.datasets.load("digits")
    parts = fb.partition.iid(len(digits.rows[1]), 400)
    federated_data = fb.federate(digits.rows, parts, test=0.2)
    model = fb.models.build("softmax", (8, 8, 1), digits.outputs)
    loss = fb.losses.cross_entropy(model.apply)
    cost = tree_cost(noise=4.0, tree=1, epoch=8, rounds=32, delta=1e-4)
    print(f"digits, {cost}: accuracy over ten seeds")
    for rate, clip in ((0.3, 0.5), (0.1, 0.2)):
        for tree in (8, 1):
            plain = fb.fedavg(loss, fb.Work(rate, steps=5, batch_size=None))
            run = fb.simulate(
                noised(plain, tree, equal_noise(tree, 4.0), clip, 50),
                model.init,
                federated_data,
                keys(10),
                rounds=32,
                cohort=fb.Cohort(50, epoch=8),
                every=32,
                splits=("test",),
                measure={"accuracy": fb.metrics.accuracy(model.apply)},
            )
            found = [
                one["measures"]["test"]["shared"]["accuracy"]["mean"]
                for one in run.summary()
            ]
            name = NAMES.get(tree, f"trees of {tree}")
            spread = f"{np.mean(found):.3f} ± {np.std(found):.3f}"
            print(f"  rate {rate}, clip {clip}, {name}: {spread}", flush=True)


def on_quadratics() -> None:
    federated_data, optimum = fb.datasets.quadratics(clients=512, dim=10)
    curvature = np.asarray(federated_data.train.examples[0]).mean(0)
    cost = tree_cost(noise=3.0, tree=1, epoch=64, rounds=64, delta=1e-4)
    print(f"quadratics, {cost}: gap to the optimum over twenty seeds, from ones")
    for rate in (0.01, 0.03, 0.1, 0.3):
        plain = fb.fedavg(
            fb.datasets.quadratic_loss, fb.Work(rate, steps=1, batch_size=None)
        )
        for tree in (1, 8, 64, BLT):
            run = fb.simulate(
                noised(plain, tree, equal_noise(tree, 3.0), 5 * rate, 8),
                jnp.ones(10),
                federated_data,
                keys(20),
                rounds=64,
                cohort=fb.Cohort(8, epoch=64),
                every=64,
            )
            away = np.asarray(run.complete().shared) - np.asarray(optimum)
            gap = np.einsum("si,ij,sj->s", away, curvature, away).mean() / 2
            name = NAMES.get(tree, f"trees of {tree}")
            print(f"  rate {rate}, {name}: {gap:.3f}", flush=True)


if __name__ == "__main__":
    on_digits()
    on_quadratics()

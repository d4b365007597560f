# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What noise for rows costs in accuracy, by data and noise.

    python row_noise.py [--seeds 3] [--only digits] [--noises 0.2 3]

FedAvg without noise and with the noise that nodes have by default, or with others, each
at the best of three rates on validation rows. Every line is a mean over seeds, which
draw splits, batches and noise. ``benchmarks/run.py row_noise`` measures the time.
"""

import argparse
import runpy
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np

import fedblend as fb
from fedblend.config.tables.privacy import ProtectRows
from fedblend.theory.privacy import row_epsilon

STORIES = Path(__file__).parents[2] / "examples" / "stories"
"""Where the generator of the made-up table is."""

DELTA = 1e-5
DEFAULT = ProtectRows()
"""The noise of a policy that says nothing else."""
FACTORS = {
    "digits": (1.0, 3.0, 10.0),
    "femnist": (0.03, 0.1, 0.3),
    "hospitals": (0.5, 1.0, 3.0),
}
"""Of the rate; that of 784 pixels must be smaller."""
ROUNDS = {"digits": 60, "femnist": 300, "hospitals": 60}


def digits(seed: int):
    """Ten nodes of about 140 training rows."""
    data = fb.datasets.load("digits")
    parts = fb.partition.iid(len(data.rows[1]), 10, seed=seed)
    return (
        fb.federate(data.rows, parts, test=0.2, validation=0.1, seed=seed),
        (8, 8, 1),
        10,
    )


def femnist(seed: int):
    """Twenty writers with 100 rows or more."""
    data = fb.datasets.load("femnist")
    assert data.keys is not None
    writers, counts = np.unique(data.keys, return_counts=True)
    chosen = writers[counts >= 100][:20]
    parts = [np.flatnonzero(data.keys == writer) for writer in chosen]
    return (
        fb.federate(data.rows, parts, test=0.2, validation=0.1, seed=seed),
        (28, 28, 1),
        62,
    )


def hospitals(seed: int):
    """The made-up table of 20 hospitals, standardized over all of them."""
    made_up = runpy.run_path(str(STORIES / "made_up_hospitals.py"))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "hospitals.csv"
        made_up["write_table"](file, made_up["hospitals"]())
        data = fb.data.read(file, target="outcome", client="hospital")
    parts = fb.partition.by_key(data.keys)
    federated = fb.data.federate_dataset(
        data, parts, test=0.3, validation=0.1, seed=seed
    )
    return federated, federated.train.examples[0].shape[1:], 2


DATA = {"digits": digits, "femnist": femnist, "hospitals": hospitals}
WORKS = {"1 step, all rows": (0.5, 1, None), "5 steps of 20 rows": (0.1, 5, 20)}
"""Rate, steps and rows of a step."""


def accuracy(name: str, model_name: str, work, noise: float | None, seed: int):
    """On test rows, at the best rate on validation rows."""
    federated, shape, classes = DATA[name](seed)
    model = fb.models.build(model_name, shape, classes)
    loss = fb.losses.cross_entropy(model.apply)
    if noise is not None:
        loss = fb.transforms.row_noise(loss, DEFAULT.clip, noise)
    found = []
    for factor in FACTORS[name]:
        run = fb.simulate(
            fb.fedavg(loss, fb.Work(factor * work[0], *work[1:])),
            model.init,
            federated,
            jax.random.key(seed),
            rounds=ROUNDS[name],
            every=ROUNDS[name],
            measure={"accuracy": fb.metrics.accuracy(model.apply)},
        )
        measures = run.summary()["measures"]
        scores = [
            measures[split]["personal"]["accuracy"]["mean"]
            for split in ("validation", "test")
        ]
        found.append((*scores, factor))
    best = max(found)
    return best[1], best[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=DATA)
    parser.add_argument("--models", nargs="+", default=["softmax", "mlp"])
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=WORKS)
    parser.add_argument("--noises", nargs="+", type=float, default=[DEFAULT.noise])
    parser.add_argument("--rounds", type=int, help="instead of those of the page")
    options = parser.parse_args()
    for name in DATA:
        if options.only not in (None, name):
            continue
        ROUNDS[name] = options.rounds or ROUNDS[name]
        for model, label in product(options.models, options.works):
            work = WORKS[label]
            for noise in (None, *options.noises):
                one = partial(accuracy, name, model, work, noise)
                found, rates = zip(*map(one, range(options.seeds)), strict=True)
                spent = ""
                if noise:
                    steps = {(noise, 1.0): ROUNDS[name] * work[1]}
                    spent = f"epsilon at most {row_epsilon(steps, DELTA):.3g}"
                print(
                    f"{name} {model}, {label}: noise {noise} "
                    f"accuracy {np.mean(found):.4f} +- {np.std(found):.4f} "
                    f"rates {rates} {spent}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What noise for rows costs: accuracy and time of a round, by data and noise.

    python row_noise.py [--seeds 3] [--only digits]

FedAvg without noise, clipped, and with noise of several sizes in ``row_noise``, each at
the better of two rates on validation rows. Every line is a mean over seeds, which draw
splits, batches and noise. A round is timed in the second of two equal runs, over that
without noise.
"""

import argparse
import runpy
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np

import fedblend as fb
from fedblend.theory.privacy import row_epsilon

STORIES = Path(__file__).parents[2] / "examples" / "stories"
"""Where the generator of the made-up table is."""

DELTA = 1e-5
NOISES = (0.0, 0.5, 1.0, 3.0, 8.0)
FACTORS = {"digits": (1.0, 3.0), "femnist": (0.03, 0.1), "hospitals": (1.0, 3.0)}
"""Of the rate; that of 784 pixels must be smaller."""
ROUNDS = {"digits": 60, "femnist": 300, "hospitals": 60}
CLIP = 3.0


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
    """Of the better rate on test rows, and the seconds of its second run."""
    federated, shape, classes = DATA[name](seed)
    model = fb.models.build(model_name, shape, classes)
    plain = fb.losses.cross_entropy(model.apply)
    loss = plain if noise is None else fb.transforms.row_noise(plain, CLIP, noise)
    measure = {"accuracy": fb.metrics.accuracy(model.apply)}
    found = []
    for factor in FACTORS[name]:
        scaled = fb.Work(factor * work[0], *work[1:])
        start = time.perf_counter()
        run = fb.simulate(
            fb.fedavg(loss, scaled),
            model.init,
            federated,
            jax.random.key(seed),
            rounds=ROUNDS[name],
            every=ROUNDS[name],
            measure=measure,
        )
        measures = run.summary()["measures"]
        seconds = time.perf_counter() - start
        scores = [
            measures[split]["personal"]["accuracy"]["mean"]
            for split in ("validation", "test")
        ]
        found.append((*scores, seconds))
    return max(found)[1], found[-1][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=DATA)
    parser.add_argument("--models", nargs="+", default=["softmax", "mlp"])
    parser.add_argument("--noises", nargs="+", type=float, default=NOISES)
    options = parser.parse_args()
    for name in DATA:
        if options.only not in (None, name):
            continue
        for model in options.models:
            for label, work in WORKS.items():
                base = None
                for noise in (None, *options.noises):
                    one = partial(accuracy, name, model, work, noise)
                    found, seconds = zip(*map(one, range(options.seeds)), strict=True)
                    base = base or np.median(seconds)
                    spent = ""
                    if noise:
                        steps = {(noise, 1.0): ROUNDS[name] * work[1]}
                        spent = f"epsilon at most {row_epsilon(steps, DELTA):.3g}"
                    print(
                        f"{name} {model}, {label}: noise {noise} "
                        f"accuracy {np.mean(found):.3f} "
                        f"time x {np.median(seconds) / base:.2f} {spent}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

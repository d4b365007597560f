# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FedBN under feature shift: the figures of docs/personal.md.

Eight clients have the same digits, each by a camera of its own: contrast, brightness,
noise, and for half of them black and white exchanged. Test accuracy, mean over clients,
of FedAvg and FedBN on a network of two hidden layers with batch normalization; of both
with layer normalization; and of training alone.

python feature_shift.py            a few minutes on two cores
python feature_shift.py --small    seconds, other figures
"""

import argparse
from typing import Literal

import jax
import numpy as np

import fedblend as fb

CLIENTS, ROWS = 8, 60
WORK = fb.Work(0.05, steps=10, batch_size=20)


def federation(seed: int) -> fb.FederatedData:
    """The clients' digits, a third of each client's for testing."""
    inputs, labels = (np.asarray(one) for one in fb.datasets.load("digits").rows)
    rng = np.random.default_rng(seed)
    images = (inputs / inputs.max()).reshape(-1, 64).astype(np.float32)
    parts = rng.permutation(len(labels))[: CLIENTS * ROWS].reshape(CLIENTS, ROWS)
    for client, rows in enumerate(parts):
        contrast, brightness = rng.uniform(0.3, 2), rng.uniform(-1, 1)
        own = 1 - images[rows] if client % 2 else images[rows]
        noise = rng.uniform(0, 0.3) * rng.normal(size=own.shape)
        images[rows] = contrast * own + brightness + noise
    return fb.federate((images, labels), parts, test=1 / 3, seed=seed)


def accuracy(
    method: str, norm: bool | Literal["batch"], seed: int, rounds: int
) -> float:
    """Test accuracy of the deployed models, mean over clients."""
    model, data = fb.models.mlp(64, 10, hidden=(64, 64), norm=norm), federation(seed)
    loss = fb.losses.cross_entropy(model.apply)
    algorithm = {
        "FedAvg": lambda: fb.fedavg(loss, WORK),
        "FedBN": lambda: fb.algorithms.fedbn(loss, WORK, normalization=["norm"]),
        "alone": lambda: fb.local_only(loss, WORK),
    }[method]()
    run = fb.simulate(
        algorithm,
        model.init,
        data,
        jax.random.key(seed),
        rounds=rounds,
        measure={"accuracy": fb.metrics.accuracy(model.apply)},
        splits=["test"],
        every=rounds,
    ).complete()
    measured = run.summary()["measures"]["test"]
    return measured["shared" if method == "FedAvg" else "personal"]["accuracy"]["mean"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    seeds, rounds = (1, 2) if parser.parse_args().small else (5, 60)
    print("| method | normalization | test accuracy, mean and deviation of seeds |")
    print("|---|---|---|")
    norms: dict[str, bool | Literal["batch"]] = {"batch": "batch", "layer": True}
    for called, norm in norms.items():
        for method in ("FedAvg", "FedBN", "alone"):
            each = [accuracy(method, norm, seed, rounds) for seed in range(seeds)]
            print(f"| {method} | {called} | {np.mean(each):.3f} ± {np.std(each):.3f} |")


if __name__ == "__main__":
    main()

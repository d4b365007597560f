# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partial personalization against its alternatives: prints a row for each method.

Digits with three classes a client, and twenty writers of FEMNIST, three seeds. Every
seed splits rows and draws parameters anew. All methods have the same network (with
layer normalization), rounds and local steps; each has its rate chosen on validation
rows, by the mean accuracy of what clients deploy after the last round. Test rows are
looked at once. FEMNIST needs ``FEDBLEND_DATA``.

python partial_presets.py [digits | femnist]
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import fedblend as fb

SEEDS, ROUNDS, CLIENTS = 3, 60, 20
RATES = (0.03, 0.1, 0.3)
TUNING = 50
"""Steps of fine-tuning."""


def digits(seed: int) -> tuple[fb.FederatedData, int, int]:
    """Three classes a client; the federation, entries of a row, and classes."""
    data = fb.datasets.load("digits")
    parts = fb.partition.classes_per_client(data.rows[1], CLIENTS, classes=3, seed=0)
    return fb.federate(data.rows, parts, validation=0.2, test=0.3, seed=seed), 64, 10


def femnist(seed: int) -> tuple[fb.FederatedData, int, int]:
    """The twenty writers with the most rows."""
    data = fb.datasets.load("femnist")
    parts = fb.partition.by_key(data.keys).rows
    most = sorted(parts, key=len, reverse=True)[:CLIENTS]
    return fb.federate(data.rows, most, validation=0.2, test=0.3, seed=seed), 784, 62


def methods(loss, part) -> dict[str, Callable]:
    """By name, from a rate to an algorithm."""

    def work(rate, steps=10):
        return fb.Work(rate, steps=steps, batch_size=10)

    head, biases = part("head"), part("biases")
    return {
        "local_only": lambda rate: fb.local_only(loss, work(rate)),
        "fedavg": lambda rate: fb.fedavg(loss, work(rate)),
        "finetune": lambda rate: fb.finetune(
            fb.fedavg(loss, work(rate)), loss, work(rate, TUNING)
        ),
        "fedper": lambda rate: fb.algorithms.fedper(loss, work(rate), head=head),
        "fedrep": lambda rate: fb.algorithms.fedrep(
            loss, work(rate), head=head, head_steps=10
        ),
        "lg_fedavg": lambda rate: fb.algorithms.lg_fedavg(
            loss, work(rate), body=part("body")
        ),
        "fedbn": lambda rate: fb.algorithms.fedbn(
            loss, work(rate), normalization=part("normalization")
        ),
        "bitfit": lambda rate: fb.algorithms.bitfit(loss, work(rate), biases=biases),
        "fedbabu": lambda rate: fb.algorithms.fedbabu(
            loss, work(rate), head=head, tuning_steps=TUNING
        ),
        "fedbabu, head": lambda rate: fb.algorithms.fedbabu(
            loss, work(rate), head=head, tuning_steps=TUNING, tuned="head"
        ),
        "apfl 0.5": lambda rate: fb.apfl(loss, work(rate), alpha=0.5, learn="fixed"),
        "apfl 0.5, head": lambda rate: fb.apfl(
            loss, work(rate), alpha=0.5, learn="fixed", mix=head
        ),
    }


def outcomes(federated_data: fb.FederatedData, inputs: int, classes: int, seed: int):
    """The test accuracies of all clients, the rate, and bits an answer, by method."""
    model = fb.models.mlp(inputs, classes, hidden=(64,), norm=True)
    rows = jnp.ones((2, inputs))
    loss = fb.losses.cross_entropy(model.apply)
    for name, build in methods(
        loss, lambda word: fb.models.find_part(model, rows, word)
    ).items():
        run = fb.simulate(
            build,
            model.init,
            federated_data,
            jax.random.key(seed),
            rounds=ROUNDS,
            every=ROUNDS,
            weights="uniform",
            over=jnp.asarray(RATES),
            measure={"accuracy": fb.metrics.accuracy(model.apply)},
            splits=["validation", "test"],
        ).complete()
        found = [
            {split: measured[split]["personal"]["accuracy"] for split in measured}
            for measured in run.measured
        ]
        best = int(np.argmax([one["validation"].mean() for one in found]))
        sent = run.bits().up.sum() / (ROUNDS * CLIENTS)
        yield name, found[best]["test"], RATES[best], sent


def worst_tenth(accuracies: np.ndarray) -> float:
    """The mean of the tenth of the clients with the lowest accuracies."""
    return float(np.sort(accuracies)[: -(-len(accuracies) // 10)].mean())


def main(sources: list[str]) -> None:
    """Print a row of the table for each method."""
    for source in sources or ["digits", "femnist"]:
        seen: dict[str, list] = {}
        for seed in range(SEEDS):
            federated_data, inputs, classes = globals()[source](seed)
            for name, *row in outcomes(federated_data, inputs, classes, seed):
                seen.setdefault(name, []).append(row)
        for name, rows in seen.items():
            tests, rates, sent = zip(*rows, strict=True)
            means = 100 * np.array([one.mean() for one in tests])
            worst = 100 * np.array([worst_tenth(one) for one in tests])
            print(
                f"| {source} | {name} | {means.mean():.1f} ({means.std(ddof=1):.1f}) | "
                f"{worst.mean():.1f} | {', '.join(map(str, rates))} | {sent[0]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What is odd about the end of a run: losses worse than chance's, what is not finite.

Chance is the best constant prediction: the frequencies of the labels in the training
rows, or their mean, of all clients. Every client counts the same, as it does in the
mean of a measure over clients.
"""

import numpy as np

from fedblend.data.federated import FederatedData
from fedblend.simulation.result import MODELS
from fedblend.simulation.run import Run


def at_end(run: Run, loss: str, seeds: list[int]) -> list[str]:
    """All that is odd about a completed run; ``loss`` is the name of its loss."""
    replicas = [run.summary()] if run.replicas is None else run.summary()
    several = len(seeds) > 1
    found = [
        f"seed {seed}: {line}" if several else line
        for seed, one in zip(seeds, replicas, strict=True)
        for line in one["warnings"]
    ]
    return [*found, *worse_than_chance(run, chance(loss, run.federated_data))]


def worse_than_chance(run: Run, chance: float | None) -> list[str]:
    """A line for what clients deploy, and one for what they would train alone."""
    replicas = run.records[-1] if run.replicas is not None else [run.records[-1]]
    lines = []
    for model in ("personal", "local"):
        worse = []
        for split, models in replicas[0].measures.items():
            if chance is None or "loss" not in models.get(model, {}):
                continue
            values = [one.measures[split][model]["loss"].mean for one in replicas]
            worst = max((v for v in values if np.isfinite(v)), default=-np.inf)
            if worst > chance:
                worse.append(f"{worst:.4g} on {split} rows")
        if worse:
            lines.append(
                f"the loss of {MODELS[model]} is {' and '.join(worse)}, worse than "
                f"{chance:.4g}, that of the best constant prediction (chance): look at "
                "the scale of the inputs, the rate and the rounds"
            )
    return lines


def chance(loss: str, federated_data: FederatedData) -> float | None:
    """The loss of the best constant prediction on the training rows, if there is one.

    Args:
        loss: its name.
        federated_data: whose training rows have inputs and targets.
    """
    train = federated_data.train
    rows = [
        np.arange(s, s + c) for s, c in zip(train.starts, train.counts, strict=True)
    ]
    targets = np.asarray(train.examples[1])[np.concatenate(rows)]
    weights = np.repeat(1 / (train.counts * federated_data.clients), train.counts)
    if loss == "squared_error":
        values = targets.reshape(len(targets), -1).astype(np.float64)
        return float(0.5 * (weights @ (values - weights @ values) ** 2).sum())
    if loss == "multilabel":
        often = weights @ (targets > 0)
        return float((_information(often) + _information(1 - often)).mean())
    if loss == "sequence_cross_entropy":
        known = targets >= 0
        places = np.maximum(known.sum(axis=1), 1)
        each = np.broadcast_to((weights / places)[:, None], targets.shape)
        targets, weights = targets[known], each[known]
    elif loss not in ("cross_entropy", "logistic"):
        return None
    often = np.bincount(targets, weights)
    total = often.sum()
    return float(total * _information(often / total).sum())


def _information(share: np.ndarray) -> np.ndarray:
    """``-p log p``, and 0 where ``p`` is."""
    return -share * np.log(np.where(share > 0, share, 1))

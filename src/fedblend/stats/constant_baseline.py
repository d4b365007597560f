# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Constant predictions: what any model has to improve on before it says anything."""

import numpy as np

from fedblend.data.federated import FederatedData
from fedblend.simulation.result import MODELS, Measures
from fedblend.stats.survival import RiskSets


def worse_than_chance(results: list[Measures], chance: float | None) -> list[str]:
    """A line for the personal models and one for training alone, where worse.

    Args:
        results: what was measured last, in each replica.
        chance: the loss of the best constant prediction, None where there is none.
    """
    lines = []
    for model in ("personal", "local"):
        worse = []
        for split, models in results[0].items():
            if chance is None or "loss" not in models.get(model, {}):
                continue
            values = [one[split][model]["loss"].mean for one in results]
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

    That prediction is the frequencies of the labels over all clients, or the mean of
    their targets. Each client counts the same, as in the mean of a metric over clients.

    Args:
        loss: its name.
        federated_data: training rows with inputs and targets.
    """
    from scipy.special import entr, xlogy  # -p log p, x log y

    train = federated_data.train
    each = [train.rows(client)[1] for client in range(federated_data.clients)]
    targets = np.concatenate(each)
    weights = np.repeat(1 / (train.counts * federated_data.clients), train.counts)
    if loss == "squared_error":
        values = targets.reshape(len(targets), -1).astype(np.float64)
        return float(0.5 * (weights @ (values - weights @ values) ** 2).sum())
    if loss == "poisson":
        return float(
            weights @ xlogy(targets, targets) - xlogy(*2 * [weights @ targets])
        )
    if loss == "multilabel":
        often = np.minimum(weights @ (targets > 0), 1)
        return float((entr(often) + entr(1 - often)).mean())
    if loss == "sequence_cross_entropy":
        known = targets >= 0
        places = np.maximum(known.sum(axis=1), 1)
        each = np.broadcast_to((weights / places)[:, None], targets.shape)
        targets, weights = targets[known], each[known]
    elif loss not in ("cross_entropy", "logistic"):
        return None
    often = np.bincount(targets, weights)
    total = often.sum()
    return float(total * entr(often / total).sum())


def constant_losses(data: FederatedData, kind: str, outputs: int, split: str):
    """The losses of two constants on a client's rows, [2, clients]; NaN without rows.

    Both are from training rows: the frequencies of the labels (or the mean target) over
    all clients, and each client's own. Every class counts once more than it occurs, so
    that none is impossible.

    Args:
        data: the clients' rows, in one split.
        kind: "classes" or "binary" (log loss), "regression" (squared error),
            "counts" (Poisson deviance) or "survival" (Cox loss).
        outputs: scores of a model: 1 for two classes, or the number of classes.
        split: "validation" or "test".
    """
    from scipy.special import xlogy

    train, held = data.train, data.splits[split]
    found = np.full((2, data.clients), np.nan)
    classes = max(outputs, 2)
    everything = np.concatenate([train.rows(i)[1] for i in range(data.clients)])
    for client in range(data.clients):
        rows = held.rows(client)[1]
        if not len(rows):
            continue
        for place, known in enumerate((everything, train.rows(client)[1])):
            if kind == "survival":  # all rows have the same risk
                found[place, client] = RiskSets(rows).loss(np.zeros(len(rows)))
                found[place, client] /= len(rows)
            elif kind == "counts":
                # One more row like all others, so that no mean is zero.
                often = (known.sum() + everything.mean()) / (len(known) + 1)
                gap = xlogy(rows, rows) - rows * np.log(often) + often - rows
                found[place, client] = 2 * gap.mean()
            elif kind == "regression":
                gap = (rows - known.mean(axis=0)) ** 2
                found[place, client] = gap.reshape(len(rows), -1).mean()
            else:
                often = np.bincount(known, minlength=classes) + 1.0
                found[place, client] = -np.log((often / often.sum())[rows]).mean()
    return found

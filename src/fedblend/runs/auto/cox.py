# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Cox models of all clients, each with its own baseline hazard, at their optimum.

They minimize, over slopes that are shared and own deviations d_i, minus the logarithm
of the clients' partial likelihoods, plus 1/2 sum_i |d_i|^2 / slopes, plus
events/2 ridge |shared|^2. Only rows of the same client are at risk together, so a
client's own hazard takes the place of an intercept, which is 0.
"""

import numpy as np

from fedblend.runs.auto.linear import PooledRows, minimize_jointly
from fedblend.stats.survival import RiskSets, concordance


def cox_models(
    rows: PooledRows, *, slopes: float = 0.0, ridge: float = 0.0, share: bool = True
) -> np.ndarray:
    """Every client's model, [clients, entries]; ``slopes`` is a variance."""
    sets = [RiskSets(rows.targets[at]) for at in rows.clients]
    events, width = sum(len(of.events) for of in sets), rows.inputs.shape[1]

    def parts(models: np.ndarray):
        scores = rows.scores(models)[:, 0]
        return [(of, scores[at], at) for of, at in zip(sets, rows.clients, strict=True)]

    def total(models: np.ndarray) -> float:
        return sum(of.loss(scores) for of, scores, _ in parts(models))

    def derivatives(models: np.ndarray):
        each = [
            of.derivatives(scores, rows.inputs[at]) for of, scores, at in parts(models)
        ]
        slope, curve = zip(*each, strict=True)
        return np.stack(slope), np.stack(curve)

    scales = np.full((len(sets), width), np.sqrt(slopes))
    penalty = np.full(width, events * ridge)
    scales[:, 0], penalty[0] = 0.0, events  # an intercept changes nothing
    return minimize_jointly(total, derivatives, scales, penalty, share)


def measure_cox(scores: np.ndarray, held: PooledRows) -> dict[str, np.ndarray]:
    """The criterion and the C-index of every client, NaN where there is none.

    The criterion is minus the logarithm of the partial likelihood of a client's
    held-out rows, over their number: 0 if no event tells anything.
    """
    parts = [(scores[at, 0], held.targets[at]) for at in held.clients]
    loss = [RiskSets(targets).loss(of) for of, targets in parts]
    counts = np.where(held.counts > 0, held.counts, np.nan)
    ranks = [concordance(*part) for part in parts]
    return {"cox_loss": np.array(loss) / counts, "c_index": np.array(ranks)}

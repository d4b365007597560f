# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Constant predictions: what any model has to improve on before it says anything.

Two of them, from training rows: the frequencies of the labels (or the mean target) over
all clients, and each client's own. Own frequencies count every class once more than it
occurs, so that none is impossible.
"""

import numpy as np

from fedblend.data.federated import FederatedData


def constant_losses(data: FederatedData, kind: str, outputs: int, split: str):
    """The losses of both constants on a client's rows, [2, clients]; NaN without rows.

    Args:
        data: the clients' rows, in one split.
        kind: "classes" or "binary" (log loss), or "regression" (squared error).
        outputs: scores of a model: 1 for two classes, or the number of classes.
        split: "validation" or "test".
    """
    train, held = data.train, data.splits[split]
    found = np.full((2, data.clients), np.nan)
    classes = max(outputs, 2)
    everything = np.concatenate([train.rows(i)[1] for i in range(data.clients)])
    for client in range(data.clients):
        rows = held.rows(client)[1]
        if not len(rows):
            continue
        for place, known in enumerate((everything, train.rows(client)[1])):
            if kind == "regression":
                gap = (rows - known.mean(axis=0)) ** 2
                found[place, client] = gap.reshape(len(rows), -1).mean()
            else:
                often = np.bincount(known, minlength=classes) + 1.0
                found[place, client] = -np.log((often / often.sum())[rows]).mean()
    return found

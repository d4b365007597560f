# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""K-fold cross-validation within every client's training rows.

Fold k validates on the k-th of K equal parts of every client's training rows and trains
on the others. Rows that divide unevenly train in all folds, so that all folds have as
many rows and can run side by side.
"""

import dataclasses

import numpy as np

from fedblend.checks import Number, gate
from fedblend.data.federated import FEDERATED_DATA, FederatedData, Shards, gather

SEVERAL = Number(least=2, whole=True)


@gate(federated_data=FEDERATED_DATA, number=SEVERAL)
def folds(federated_data: FederatedData, number: int) -> list[FederatedData]:
    """The same clients in each fold, without test rows.

    A client with fewer rows than folds validates on none. The rows of a client lie
    twice in arrays that all folds share, so that what a fold trains on is one window.

    Args:
        federated_data: the clients; only their training rows are used.
        number: of folds.

    Example:
        >>> import fedblend as fb
        >>> data = fb.federate(np.arange(5), [np.arange(5)])
        >>> first, second = fb.data.folds(data, 2)
        >>> first.train.counts, first.validation.rows(0), second.validation.rows(0)
        (array([3]), array([2, 4]), array([3, 0]))
    """
    train = federated_data.train
    windows = zip(train.starts, train.starts + train.counts, strict=True)
    twice = gather(
        train.examples, [np.tile(np.arange(start, stop), 2) for start, stop in windows]
    )
    part = train.counts // number

    def window(first: np.ndarray, count: np.ndarray) -> Shards:
        return Shards(twice.examples, twice.starts + first, count)

    return [
        dataclasses.replace(
            federated_data,
            train=window((fold + 1) * part, train.counts - part),
            validation=window(fold * part, part),
            test=None,
        )
        for fold in range(number)
    ]

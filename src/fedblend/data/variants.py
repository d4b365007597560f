# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated data from others: folds, unseen clients, several as one."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fedblend.checks import CHANCE, WHOLE, Number, gate
from fedblend.data.dataset import DataError, generator
from fedblend.data.federated import (
    FEDERATED_DATA,
    FederatedData,
    Shards,
    gather,
    join_rows,
)

SEVERAL = Number(least=2, whole=True)


@gate(federated_data=FEDERATED_DATA, number=SEVERAL)
def folds(federated_data: FederatedData, number: int) -> list[FederatedData]:
    """The same clients in each fold of a cross-validation, without test rows.

    Fold k validates on the k-th of K equal parts of every client's training rows and
    trains on the others. Rows that divide unevenly train in all folds, so that all
    folds have as many rows and can run side by side.

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


@gate(federated_data=FEDERATED_DATA, fraction=CHANCE, seed=WHOLE)
def split_clients(
    federated_data: FederatedData, fraction: float, seed: int = 0
) -> tuple[FederatedData, FederatedData]:
    """The clients that train, and those held out, whom no training sees.

    Args:
        federated_data: all clients.
        fraction: of clients held out, at least one client; in (0, 1).
        seed: of the choice, which depends on nothing else.
    """
    clients = federated_data.clients
    number = max(round(fraction * clients), 1)
    if number >= clients:
        raise DataError(
            f"unseen: {fraction:g} of {clients} clients leaves none to train"
        )
    held_out = np.sort(generator(seed, "unseen").permutation(clients)[:number])
    training = np.setdiff1d(np.arange(clients), held_out)
    return (
        federated_data.select(training.tolist()),
        federated_data.select(held_out.tolist()),
    )


def one_class_clients(federated_data: FederatedData) -> list[int]:
    """The ids of clients whose training targets are all the same class.

    They deserve a warning: the loss of such a client has no minimizer unless it is
    regularized.
    """
    targets = np.asarray(federated_data.train.examples[1])
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
        return []
    starts = np.asarray(federated_data.train.starts)
    # Every second piece lies between two clients; one entry more makes the end legal.
    pieces = np.stack([starts, starts + federated_data.train.counts], axis=1).ravel()
    padded = np.append(targets, targets[-1:])
    low = np.minimum.reduceat(padded, pieces)[::2]
    high = np.maximum.reduceat(padded, pieces)[::2]
    return np.flatnonzero(low == high).tolist()


def concatenate(datasets: Mapping[str, FederatedData]) -> FederatedData:
    """The clients of several datasets as one, in order.

    Clients are named ``"phones/0"`` after their dataset and their name in it. Splits
    are those that all datasets have; rows must have the same structure and shapes.
    """
    parts = list(datasets.values())
    joined = {}
    for name in parts[0].splits:
        if all(name in part.splits for part in parts):
            splits = [part.splits[name] for part in parts]
            examples, starts, _ = join_rows(splits)
            counts = np.concatenate([split.counts for split in splits])
            joined[name] = Shards(examples, np.concatenate(starts), counts)
    names = tuple(
        f"{population}/{part.name(client)}"
        for population, part in datasets.items()
        for client in range(part.clients)
    )
    return FederatedData(**joined, names=names)

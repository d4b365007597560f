# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tasks of the board: data, network and local work of a published table.

PFLlib's Fashion-MNIST: all 70,000 images are divided among 20 clients, and of each
client's rows 75 % train. Written from the description of its partitions and from how
its program divides rows:

*classes*: clients 0 to 3 share the classes 0 and 1, clients 4 to 7 the classes 2 and 3,
and so on. Of each class the first three clients get a number of rows drawn between a
tenth and all of an equal share, the fourth gets the rest: five clients have about half
of all rows.

*dirichlet*: each class is divided by proportions drawn from Dirichlet(0.1), of which
those of clients that have an equal share of all rows already are set to 0; drawn again
until each client has 40 rows.

Where this differs from PFLlib: the random numbers are NumPy's Generator's, so that
clients have other rows; clients are in order of their size, which changes no result
and lets clients of about the same size train together; the rows that do not train
are halved into validation and test rows, see ``protocol``.

FedEM's synthetic data: 300 clients, whose rows come from three linear models in shares
of their own; labels are those of the authors' program, which made the table, see
``datasets.synthetic_mixture``.

Where this differs from FedEM: 400 test rows a client instead of 5,000; a softmax over
two scores; the paper tunes rates for each method, and does not print them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import fedblend as fb
from fedblend.data.federated import FederatedData, gather
from fedblend.models.model import Model
from fedblend_reproductions.board.network import Precision, network
from fedblend_reproductions.datasets import synthetic_mixture

CLIENTS, CLASSES, LEAST_ROWS = 20, 10, 40


class Task(NamedTuple):
    """A published table's data and training.

    Attributes:
        name: of the task's folder.
        title: a few words.
        settings: plain values that fix the data and the local work; part of the hash.
        data: makes the federated data, with validation and test rows.
        model: to train.
        batch_size: rows of a local step; a round is one epoch.
        rates: that every method is tuned over; the published one first.
        rounds: of the published table.
        chunk: clients trained side by side.
        first_rate: what the first rate is.
        skips: methods that make no sense here.
    """

    name: str
    title: str
    settings: dict[str, Any]
    data: Callable[[], FederatedData]
    model: Model
    batch_size: int
    rates: tuple[float, ...]
    rounds: int
    chunk: int | None = None
    first_rate: str = "the published one"
    skips: tuple[str, ...] = ()

    @staticmethod
    def every(rounds: int) -> int:
        """Rounds between two measurements: up to 100 measurements of a run."""
        return max(-(-rounds // 100), 2)

    @staticmethod
    def tuning_rounds(rounds: int) -> int:
        """Rounds of the runs that choose a rate."""
        return max(rounds // 4, 1)


def by_classes(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """The rows of each client, two classes a client."""
    draws, parts = np.random.default_rng(seed), [[] for _ in range(CLIENTS)]
    together = CLIENTS * 2 // CLASSES
    for label in range(CLASSES):
        rows = np.flatnonzero(labels == label)
        share = len(rows) // together
        least = max(share // 10, LEAST_ROWS // CLASSES)
        edges = np.cumsum(draws.integers(least, share, together - 1))
        first = label // 2 * together
        for place, piece in enumerate(np.split(rows, edges)):
            parts[first + place].append(piece)
    return by_size([np.concatenate(part) for part in parts])


def by_dirichlet(
    labels: np.ndarray, seed: int, concentration: float = 0.1
) -> list[np.ndarray]:
    """The rows of each client, classes in proportions of a Dirichlet distribution."""
    draws, share = np.random.default_rng(seed), len(labels) / CLIENTS
    while True:
        parts = [np.empty(0, int)] * CLIENTS
        for label in range(CLASSES):
            rows = draws.permutation(np.flatnonzero(labels == label))
            wanted = draws.dirichlet(np.full(CLIENTS, concentration))
            wanted *= [len(part) < share for part in parts]
            edges = (np.cumsum(wanted / wanted.sum()) * len(rows)).astype(int)[:-1]
            pieces = np.split(rows, edges)
            parts = [np.concatenate(pair) for pair in zip(parts, pieces, strict=True)]
        if min(map(len, parts)) >= LEAST_ROWS:
            return by_size(parts)


def by_size(parts: list[np.ndarray]) -> list[np.ndarray]:
    """The clients with the most rows first."""
    return sorted(parts, key=len, reverse=True)


def fashion(
    name: str,
    title: str,
    divide: Callable[[np.ndarray, int], list[np.ndarray]],
    precision: Precision = "tf32",
) -> Task:
    """A column of PFLlib's table."""

    def data() -> FederatedData:
        dataset = fb.datasets.load("fashion_mnist")
        assert dataset.test_rows is not None
        images, labels = (
            np.concatenate(pair)
            for pair in zip(dataset.rows, dataset.test_rows, strict=True)
        )
        parts = divide(labels, 1)
        return fb.federate((images, labels), parts, validation=0.125, test=0.125)

    settings = {
        "data": "fashion_mnist, 70000 rows",
        "partition": divide.__name__,
        "partition_seed": 1,
        "clients": CLIENTS,
        "held_out": "0.125 validation, 0.125 test",
        "network": "convolutions 32-64, hidden 512, PyTorch's start",
        "precision": precision,
        "batch_size": 10,
        "epochs": 1,
        "take_part": "all",
    }
    return Task(
        name,
        title,
        settings,
        data,
        network(precision=precision),
        batch_size=10,
        rates=(0.005, 0.015, 0.05),
        rounds=2000,
        chunk=5,
    )


def fedem_data() -> FederatedData:
    """FedEM's clients, the largest first; their test rows are shuffled and halved.

    Shuffled, because a client's rows come in the order of the models that label them.
    """
    rows, test_rows, keys, test_keys = _mixture()
    order = np.argsort(-np.bincount(keys), kind="stable")
    train = [np.flatnonzero(keys == client) for client in order]
    draws = np.random.default_rng(0)
    tests = [draws.permutation(np.flatnonzero(test_keys == one)) for one in order]
    federated = fb.federate(
        rows,
        train,
        test_rows=test_rows,
        test_partition=[own[: len(own) // 2] for own in tests],
    )
    validation = gather(test_rows, [own[len(own) // 2 :] for own in tests])
    return dataclasses.replace(federated, validation=validation)


def _mixture() -> tuple[Any, ...]:
    options = {"as_in_code": True, "test_points": 400}
    dataset = synthetic_mixture(**options)
    return dataset.rows, dataset.test_rows, dataset.keys, dataset.test_keys


FEDEM = Task(
    "fedem_synthetic",
    "FedEM's synthetic data",
    {
        "data": "synthetic_mixture, as in code, 400 test rows, seed 0",
        "held_out": "200 validation, 200 test, shuffled",
        "network": "softmax",
        "batch_size": 128,
        "epochs": 1,
        "take_part": "all",
    },
    fedem_data,
    fb.models.softmax(150, 2),
    batch_size=128,
    rates=(1.0, 0.3, 3.0),
    rounds=200,
    first_rate="ours: the paper does not print them",
    # A linear model has no head, and its epochs few steps.
    skips=(
        *("fedrep", "fedper", "fedala", "feddbe", "fedbabu", "lg_fedavg"),
        *("l2gd", "scafflix"),
    ),
)

TASKS = {
    task.name: task
    for task in (
        fashion("fashion_classes", "Fashion-MNIST, 2 classes a client", by_classes),
        fashion("fashion_dirichlet", "Fashion-MNIST, Dirichlet(0.1)", by_dirichlet),
        FEDEM,
    )
}

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partitions, which say which client holds which rows, and functions that make them.

These functions (partitioners) turn labels or keys into a partition. The result depends
on the arguments and the seed alone. A partitioner costs about one sort of the rows,
also with 100,000 clients, and always terminates.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from fedblend.checks import COUNT, POSITIVE, WHOLE, gate
from fedblend.data.dataset import DataError, Dataset, Rows, generator, group_rows
from fedblend.data.federated import FederatedData, federate, fit_preprocessing


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The row numbers of every client, and the partitioner that made them."""

    rows: tuple[np.ndarray, ...]
    """For every client, the numbers of its rows (int64)."""
    names: tuple[str, ...] = ()
    """The clients' own names; empty where they are only numbered."""
    description: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The partitioner's name and arguments."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, client: int) -> np.ndarray:
        return self.rows[client]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.rows)

    @property
    def counts(self) -> np.ndarray:
        """The number of rows of every client."""
        return np.array([len(index) for index in self.rows], np.int64)

    @property
    def hash(self) -> str:
        """The sha256 of all row numbers, in hexadecimal; names do not count."""
        digest = hashlib.sha256()
        digest.update(self.counts.astype("<i8").tobytes())
        digest.update(_join(self.rows).astype("<i8").tobytes())
        return digest.hexdigest()


def _join(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)


def _share(weights: np.ndarray, rows: int) -> np.ndarray:
    """The owners of so many rows, in proportion to the weights of the clients."""
    share = np.cumsum(weights)
    edges = np.rint(share / share[-1] * rows).astype(np.int64)
    return np.repeat(np.arange(len(weights)), np.diff(edges, prepend=0))


def federate_dataset(
    dataset: Dataset,
    partition: Partition,
    *,
    validation: float = 0.0,
    test: float | Literal["official"] = 0.0,
    seed: int = 0,
    split: int = 0,
) -> FederatedData:
    """Divide a dataset among clients; a raw table is preprocessed.

    Args:
        dataset: the rows.
        partition: which client holds which rows.
        validation: fraction of every client's own rows held out for validation.
        test: fraction held out for testing, or "official": the dataset's own test
            set. Natural clients (``by_key``) get the test rows with their key, where
            any key matches. Otherwise the test rows of each class are divided in
            proportion to the clients' rows of that class, each row once (rows of a
            class that no client holds are left out); where rows have no single
            class, in proportion to the clients' rows.
        seed: of the held-out rows and of the shuffle.
        split: another number holds out as many of every client's rows, but others (and
            divides the official test set anew).
    """
    divided = divide(
        dataset, partition, validation=validation, test=test, seed=seed, split=split
    )
    if dataset.schema is None:
        return divided
    return divided.preprocess(fit_preprocessing(dataset.schema, divided))


def divide(
    dataset: Dataset,
    partition: Partition,
    *,
    validation: float,
    test: float | Literal["official"],
    seed: int,
    split: int,
) -> FederatedData:
    """Divide a dataset among clients, without preprocessing; see the function above."""
    rows = len(dataset.rows[0])
    held = _join(partition.rows)
    if held.size and (held.min() < 0 or held.max() >= rows):
        raise DataError(
            f"partition: row {held.max() if held.max() >= rows else held.min()} is not "
            f"in the dataset, whose {rows} rows are 0..{rows - 1}"
        )
    tested: dict[str, Any] = {"test": test}
    if isinstance(test, str):
        if test != "official":
            raise DataError(f'test: {test!r} is not "official" or a fraction in [0, 1)')
        if dataset.test_rows is None:
            raise DataError(
                f"test: {dataset.name or 'this dataset'} has no official test set; "
                "give a fraction in (0, 1) instead"
            )
        tested = {
            "test_rows": dataset.test_rows,
            "test_partition": _test_partition(dataset, partition, seed, split),
        }
    found = federate(
        plain_arrays(dataset.rows),
        partition,
        validation=validation,
        seed=seed,
        split=split,
        time=dataset.time,
        groups=dataset.groups,
        **tested,
    )
    return dataclasses.replace(found, label_names=dataset.label_names)


def plain_arrays(rows: Rows) -> Rows:
    """Rows as plain arrays, those of a raw table too: for whoever preprocesses them."""
    return np.asarray(rows[0]), np.asarray(rows[1])


def _test_partition(
    dataset: Dataset, partition: Partition, seed: int, split: int
) -> list[np.ndarray]:
    """Each client's rows of the official test set; see ``federate_dataset``."""
    assert dataset.test_rows is not None
    owner = np.full(len(dataset.test_rows[1]), -1, np.int64)
    if partition.description.get("partition") == "by_key" and (
        dataset.test_keys is not None
    ):
        ids = {name: client for client, name in enumerate(partition.names)}
        known, which = np.unique(dataset.test_keys, return_inverse=True)
        owner = np.array([ids.get(str(key), -1) for key in known], np.int64)[which]
    if (owner < 0).all():
        owner = _proportional(dataset, partition, seed, split)
    return group_rows(owner, len(partition))


def _proportional(
    dataset: Dataset, partition: Partition, seed: int, split: int
) -> np.ndarray:
    """The client of each test row, in proportion to what the clients train on."""
    assert dataset.test_rows is not None
    clients = len(partition)
    holder = np.repeat(np.arange(clients), partition.counts)
    groups, test_groups = dataset.rows[1][_join(partition.rows)], dataset.test_rows[1]
    if dataset.kind not in ("classes", "binary"):
        groups, test_groups = np.zeros(len(groups)), np.zeros(len(test_groups))
    owner = np.full(len(test_groups), -1, np.int64)
    rng = generator(seed, f"official test {split}" if split else "official test")
    for group in np.unique(test_groups):
        counts = np.bincount(holder[groups == group], minlength=clients)
        mine = rng.permutation(np.flatnonzero(test_groups == group))
        if counts.sum():
            owner[mine] = _share(counts, len(mine))
    return owner


@gate(rows=WHOLE, clients=COUNT, seed=WHOLE)
def iid(rows: int, clients: int, seed: int = 0) -> Partition:
    """Divide shuffled rows evenly."""
    _check_clients(clients, rows)
    pieces = np.array_split(generator(seed, "iid").permutation(rows), clients)
    return _describe("iid", pieces, clients=clients, seed=seed)


@gate(rows=WHOLE, clients=COUNT)
def contiguous(rows: int, clients: int) -> Partition:
    """Cut the rows, in their own order, into pieces of almost equal length."""
    _check_clients(clients, rows)
    pieces = np.array_split(np.arange(rows), clients)
    return _describe("contiguous", pieces, clients=clients)


@gate(clients=COUNT, classes=COUNT, seed=WHOLE)
def classes_per_client(
    labels: np.ndarray, clients: int, classes: int, seed: int = 0
) -> Partition:
    """Give every client the same number of classes, chosen at random.

    Every class goes to almost equally many clients, which divide all its rows evenly;
    no class is left out unless there are fewer choices than classes.
    """
    names, codes, sizes = _classes(labels)
    _check_clients(clients, len(codes))
    if classes > len(names):
        raise DataError(
            f"classes: {classes} a client is not in 1..{len(names)}, the number of "
            "classes of the data"
        )
    room = np.minimum(sizes, clients)
    if room.sum() < clients * classes:
        raise DataError(
            f"classes: {clients} clients x {classes} classes need {clients * classes} "
            f"shares of a class, but the rows allow only {room.sum()}"
        )
    rng = generator(seed, "classes per client")
    chosen = _swap_classes(_choose_classes(room, clients, classes, rng), rng)
    client = np.repeat(np.arange(clients), classes)
    rows = group_rows(share_classes(codes, chosen.ravel(), client, rng), clients)
    options = {"clients": clients, "classes": classes, "seed": seed}
    return _describe("classes_per_client", rows, **options)


@gate(clients=COUNT, concentration=POSITIVE, seed=WHOLE, minimum=WHOLE)
def dirichlet(
    labels: np.ndarray,
    clients: int,
    concentration: float,
    seed: int = 0,
    minimum: int = 1,
) -> Partition:
    """Divide every class in proportions drawn from a Dirichlet distribution.

    A small concentration gives a class to few clients. Clients with fewer than
    ``minimum`` rows get random ones from the largest clients: nothing is redrawn, so
    this terminates for any concentration.
    """
    names, codes, sizes = _classes(labels)
    _check_clients(clients, len(codes), minimum)
    rng = generator(seed, "dirichlet")
    owner = np.empty(len(codes), np.int64)
    for code in range(len(names)):
        # Gamma draws as logarithms: at concentration 1e-3 most of them underflow.
        draws = np.log(rng.standard_gamma(concentration + 1, clients))
        draws += np.log1p(-rng.random(clients)) / concentration
        mine = rng.permutation(np.flatnonzero(codes == code))
        owner[mine] = _share(np.exp(draws - draws.max()), sizes[code])
    rows = group_rows(_top_up(owner, clients, minimum, rng), clients)
    options = {"concentration": concentration, "minimum": minimum, "seed": seed}
    return _describe("dirichlet", rows, clients=clients, **options)


@gate(clients=COUNT, per_client=COUNT, seed=WHOLE)
def shards(
    labels: np.ndarray, clients: int, per_client: int = 2, seed: int = 0
) -> Partition:
    """Sort by label, cut into equal shards, give some at random to every client.

    McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data" (AISTATS 2017).
    """
    _, codes, _ = _classes(labels)
    _check_clients(clients, len(codes))
    if clients * per_client > len(codes):
        raise DataError(
            f"per_client: {clients} clients x {per_client} shards is not in "
            f"1..{len(codes)}, the number of rows"
        )
    rng = generator(seed, "shards")
    order = rng.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    total = clients * per_client
    piece = np.repeat(np.arange(total), _even_counts(len(codes), total))
    owner = np.empty(len(codes), np.int64)
    owner[order] = (rng.permutation(total) // per_client)[piece]
    options = {"clients": clients, "per_client": per_client, "seed": seed}
    return _describe("shards", group_rows(owner, clients), **options)


@gate(minimum=WHOLE)
def by_key(keys: np.ndarray | None, minimum: int = 1) -> Partition:
    """One client for each key, sorted by key; drop clients below ``minimum`` rows."""
    if keys is None or len(keys) == 0:
        raise DataError("by_key: the dataset has no natural clients (no keys)")
    names, owner, counts = np.unique(
        np.asarray(keys), return_inverse=True, return_counts=True
    )
    large = counts >= minimum
    if not large.any():
        raise DataError(
            f"minimum: {minimum} rows is more than the largest of the {len(names)} "
            f"clients has, {counts.max()}"
        )
    owner = np.where(large, np.cumsum(large) - 1, -1)[owner.reshape(-1)]
    rows = group_rows(owner, int(large.sum()))
    dropped = int((~large).sum())
    partition = _describe("by_key", rows, minimum=minimum, dropped=dropped)
    return dataclasses.replace(partition, names=tuple(map(str, names[large])))


def _describe(name: str, rows: Sequence[np.ndarray], **options: Any) -> Partition:
    return Partition(tuple(rows), description={"partition": name, **options})


def _check_clients(clients: int, rows: int, minimum: int = 1) -> None:
    if clients * max(minimum, 1) > rows:
        raise DataError(
            f"clients: {clients} with at least {max(minimum, 1)} rows each are too "
            f"many for {rows} rows"
        )


def _classes(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The labels that occur, the number of each row's label among them, their sizes."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or len(labels) == 0:
        raise DataError(f"labels: need one label a row, not shape {labels.shape}")
    if np.issubdtype(labels.dtype, np.inexact):
        raise DataError(f"labels: must be classes, not {labels.dtype} numbers")
    return np.unique(labels, return_inverse=True, return_counts=True)


def _even_counts(total: int, pieces: int) -> np.ndarray:
    """Lengths of ``pieces`` almost equal pieces, the longer ones first."""
    return total // pieces + (np.arange(pieces) < total % pieces)


def _choose_classes(
    room: np.ndarray, clients: int, classes: int, rng: np.random.Generator
) -> np.ndarray:
    """Distinct classes for each client, [clients, classes], all about equally often.

    A class goes to at most ``room`` clients. Class by class, clients take turns: as no
    class goes to more clients than there are, no client gets a class twice.
    """
    order = rng.permutation(len(room))
    order = order[np.argsort(room[order], kind="stable")]
    uses = np.zeros(len(room), np.int64)
    left = clients * classes
    for done, code in enumerate(order):
        uses[code] = min(room[code], left // (len(room) - done))
        left -= uses[code]
    shuffled = rng.permutation(len(room))
    stream = np.repeat(shuffled, uses[shuffled])
    return stream.reshape(classes, clients).T.copy()


def _swap_classes(chosen: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Swap classes between random pairs of clients until the order is random."""
    clients, classes = chosen.shape
    half = clients // 2
    for _ in range(20 * classes if half else 0):
        order = rng.permutation(clients)
        left, right = order[:half], order[half : 2 * half]
        i, j = rng.integers(classes, size=(2, half))
        mine, yours = chosen[left, i], chosen[right, j]
        free = ~(chosen[left] == yours[:, None]).any(axis=1)
        free &= ~(chosen[right] == mine[:, None]).any(axis=1)
        chosen[left[free], i[free]] = yours[free]
        chosen[right[free], j[free]] = mine[free]
    return chosen


def share_classes(
    codes: np.ndarray, chosen: np.ndarray, client: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The client of each row when all clients of a class take equal shares of it."""
    owner = np.full(len(codes), -1, np.int64)
    for code in np.unique(chosen):
        takers = rng.permutation(client[chosen == code])
        mine = rng.permutation(np.flatnonzero(codes == code))
        owner[mine] = np.repeat(takers, _even_counts(len(mine), len(takers)))
    return owner


def _top_up(
    owner: np.ndarray, clients: int, minimum: int, rng: np.random.Generator
) -> np.ndarray:
    """Move random rows from the largest clients to those below the minimum.

    The same as moving one row at a time from the largest client: all givers come down
    to one level, which bisection finds.
    """
    counts = np.bincount(owner, minlength=clients)
    lacking = np.maximum(minimum - counts, 0)
    if not lacking.any():
        return owner
    low, high = minimum, int(counts.max())
    while low < high:
        level = (low + high + 1) // 2
        enough = np.maximum(counts - level, 0).sum() >= lacking.sum()
        low, high = (level, high) if enough else (low, level - 1)
    giving = np.maximum(counts - low, 0)
    givers = np.flatnonzero(giving)
    giving[givers[: giving.sum() - lacking.sum()]] -= 1
    order = np.lexsort((rng.random(len(owner)), owner))
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    moved = rng.permutation(order[place < np.repeat(giving, counts)])
    owner = owner.copy()
    owner[moved] = np.repeat(np.arange(clients), lacking)
    return owner

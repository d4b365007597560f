# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A dataset before it is shared out among clients, and how it becomes a federation.

Images are float32 in [0, 1], four bytes a pixel: MNIST takes 220 MB, all of CIFAR-10
740 MB, and building a federation makes one copy.
"""

import importlib
import zlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from fedblend.data.federated import FederatedData, federate

if TYPE_CHECKING:
    from fedblend.data.partition.partition import Partition

Kind = Literal["classes", "binary", "regression", "sequence", "tags"]
"""What the targets are: class numbers, 0 or 1, real numbers, the class that follows at
each place of a sequence of classes (negative where none counts), or ones and zeros
over the labels that a row may have several of."""

Rows = tuple[np.ndarray, np.ndarray]
"""Inputs and targets, one entry of each for every row."""


class DataError(ValueError):
    """Something is wrong with the data or with how it was asked for: one line."""


class MissingDataError(DataError, FileNotFoundError):
    """A file or folder that should hold data is not there."""


class AbsentColumnError(DataError):
    """A column or array that is asked for and not there; ``name`` is its name."""

    def __init__(self, name: str, text: str):
        super().__init__(text)
        self.name = name


class Dataset(NamedTuple):
    """All rows of a dataset, with the client of each row where nature gives one."""

    rows: Rows
    """``(inputs[rows, ...], targets[rows, ...])``."""
    kind: Kind
    """What the targets are."""
    outputs: int
    """Scores a model gives: classes or labels, 1 for binary, the target's width."""
    test_rows: Rows | None = None
    """The official test set."""
    keys: np.ndarray | None = None
    """The natural client of each row: strings or integers."""
    test_keys: np.ndarray | None = None
    """The natural client of each test row."""
    name: str = ""
    """What to call it in reports."""
    label_names: tuple[str, ...] = ()
    """The names of the classes, by number."""
    columns: tuple[str, ...] = ()
    """The names of the inputs, where they came as a table."""
    notes: tuple[str, ...] = ()
    """What was decided in reading it, for its owner to know."""


def check(dataset: Dataset) -> None:
    """Raise a one-line ``DataError`` for a dataset that cannot be trained on."""
    if dataset.kind not in get_args(Kind):
        raise DataError(
            f"kind: {dataset.kind!r} is not one of {', '.join(get_args(Kind))}"
        )
    check_rows(dataset, dataset.rows, dataset.keys, dataset.name or "dataset")
    if dataset.kind != "regression":
        found = np.unique(dataset.rows[1])
        if len(found) < 2:
            raise DataError(
                f"{dataset.name or 'dataset'}: all {len(dataset.rows[1])} targets are "
                f"{found[0]}; at least 2 classes are needed"
            )
    if dataset.test_rows is not None:
        where = f"{dataset.name or 'dataset'} (test)"
        check_rows(dataset, dataset.test_rows, dataset.test_keys, where)


def check_rows(
    dataset: Dataset, rows: Rows, keys: np.ndarray | None, where: str
) -> None:
    """Raise a one-line ``DataError`` for rows that are not of the dataset's kind."""
    inputs, targets = rows
    if len(inputs) == 0:
        raise DataError(f"{where}: there are no rows")
    for what, values in (("targets", targets), ("client keys", keys)):
        if values is not None and len(values) != len(inputs):
            raise DataError(
                f"{where}: {len(inputs)} rows of inputs, but {len(values)} {what}"
            )
    _check_finite(inputs, dataset.columns, f"{where}: inputs")
    _check_finite(targets, (), f"{where}: targets")
    if dataset.kind == "sequence":
        _check_numbers(dataset, "input", inputs, (len(inputs), inputs.shape[-1]), where)
        _check_numbers(dataset, "target", np.maximum(targets, 0), inputs.shape, where)
    elif dataset.kind == "tags":
        wanted = (len(inputs), dataset.outputs)
        _check_numbers(dataset, "target", targets, wanted, where)
    elif dataset.kind != "regression":
        _check_numbers(dataset, "target", targets, (len(inputs),), where)


def _check_numbers(
    dataset: Dataset, what: str, values: np.ndarray, shape: tuple[int, ...], where: str
) -> None:
    """Class numbers of this shape; 0 or 1 for binary and tags."""
    if not np.issubdtype(values.dtype, np.integer) or values.shape != shape:
        each = "one integer a row" if len(shape) == 1 else f"integers of shape {shape}"
        raise DataError(
            f"{where}: {what}s must be {each}, not {values.dtype} of shape "
            f"{values.shape}"
        )
    top = 1 if dataset.kind in ("binary", "tags") else dataset.outputs - 1
    wrong = np.argwhere((values < 0) | (values > top))
    if wrong.size:
        place = tuple(wrong[0])
        raise DataError(
            f"{where}: {what} {values[place]} in row {place[0]} (counted from 0) is "
            f"not a class in 0..{top}"
        )


def _check_finite(values: np.ndarray, columns: tuple[str, ...], where: str) -> None:
    if not np.issubdtype(values.dtype, np.inexact) or np.isfinite(values).all():
        return
    place = tuple(int(axis) for axis in np.argwhere(~np.isfinite(values))[0])
    column = ", ".join(str(axis) for axis in place[1:])
    if columns and len(place) == 2:
        column = repr(columns[place[1]])
    at = f"row {place[0]} (counted from 0)" + (f", column {column}" if column else "")
    raise DataError(f"{where}: {at} is {values[place]}; only finite numbers are usable")


def one_class_clients(federated_data: FederatedData) -> list[int]:
    """The ids of clients all of whose training targets are the same class.

    They are a reason to warn: such a client has no best model of its own unless its
    loss is regularized.
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


def federation_of(
    dataset: Dataset,
    partition: "Partition",
    *,
    validation: float = 0.0,
    test: float | Literal["official"] = 0.0,
    seed: int = 0,
    split: int = 0,
) -> FederatedData:
    """Share a dataset out among clients.

    Args:
        dataset: the rows.
        partition: which client holds which of them.
        validation: fraction of every client's own rows held out for validation.
        test: fraction held out for testing, or "official": the dataset's own test
            set. Natural clients (``by_key``) get the test rows with their key, where
            any key matches. Otherwise each class's test rows are shared in
            proportion to the clients' rows of that class, each row once (rows of a
            class that no client holds are left out); where rows have no single
            class, in proportion to the clients' rows.
        seed: of the held-out rows and of the shuffle.
        split: another number holds out others of every client's rows, as many as before
            (and shares the official test set out anew).
    """
    rows = len(dataset.rows[0])
    held = np.concatenate([*partition.rows, np.empty(0, np.int64)])
    if held.size and (held.min() < 0 or held.max() >= rows):
        raise DataError(
            f"partition: row {held.max() if held.max() >= rows else held.min()} is not "
            f"in the dataset, whose {rows} rows are 0..{rows - 1}"
        )
    if isinstance(test, str):
        if test != "official":
            raise DataError(f'test: {test!r} is not "official" or a fraction in [0, 1)')
        if dataset.test_rows is None:
            raise DataError(
                f"test: {dataset.name or 'this dataset'} has no official test set; "
                "give a fraction in (0, 1) instead"
            )
        return federate(
            dataset.rows,
            partition.rows,
            validation=validation,
            test_rows=dataset.test_rows,
            test_partition=_share_test(dataset, partition, seed, split),
            names=partition.names,
            seed=seed,
            split=split,
        )
    return federate(
        dataset.rows,
        partition.rows,
        validation=validation,
        test=test,
        names=partition.names,
        seed=seed,
        split=split,
    )


def _share_test(
    dataset: Dataset, partition: "Partition", seed: int, split: int
) -> list[np.ndarray]:
    """Each client's rows of the official test set; see ``federation_of``."""
    assert dataset.test_rows is not None
    targets = dataset.test_rows[1]
    owner = np.full(len(targets), -1, np.int64)
    if partition.description.get("partition") == "by_key" and (
        dataset.test_keys is not None
    ):
        ids = {name: client for client, name in enumerate(partition.names)}
        known, which = np.unique(dataset.test_keys, return_inverse=True)
        owner = np.array([ids.get(str(key), -1) for key in known], np.int64)[which]
    if (owner < 0).all():
        owner = _proportional(dataset, partition, seed, split)
    order = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[order], np.arange(len(partition.rows) + 1))
    return np.split(order, edges)[1:-1]


def _proportional(
    dataset: Dataset, partition: "Partition", seed: int, split: int
) -> np.ndarray:
    """The client of each test row, in proportion to what the clients train on."""
    assert dataset.test_rows is not None
    clients = len(partition.rows)
    held = np.concatenate(partition.rows)
    holder = np.repeat(np.arange(clients), [len(index) for index in partition.rows])
    grouped = dataset.kind in ("classes", "binary")
    groups = dataset.rows[1][held] if grouped else np.zeros(len(held), int)
    targets = dataset.test_rows[1]
    test_groups = targets if grouped else np.zeros(len(targets), int)
    owner = np.full(len(targets), -1, np.int64)
    rng = generator(seed, f"official test {split}" if split else "official test")
    for group in np.unique(test_groups):
        counts = np.bincount(holder[groups == group], minlength=clients)
        mine = rng.permutation(np.flatnonzero(test_groups == group))
        if counts.sum():
            share = np.cumsum(counts) / counts.sum()
            edges = np.rint(share * len(mine)).astype(np.int64)
            owner[mine] = np.repeat(np.arange(clients), np.diff(edges, prepend=0))
    return owner


def generator(seed: int, purpose: str) -> np.random.Generator:
    """The random generator of a seed for one purpose; the word is part of the seed."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed: {seed!r} is not an integer of 0 or more")
    return np.random.default_rng((int(seed), zlib.crc32(purpose.encode())))


def require(module: str, purpose: str, package: str = "") -> Any:
    """Import a module of the [data] extra, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = package or module.partition(".")[0]
        raise DataError(
            f"{purpose}: needs {package}: pip install 'fedblend[data]'"
        ) from None

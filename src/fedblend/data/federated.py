# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated data: every client's rows, split into train, validation and test.

The rows of all clients lie one after another in flat arrays; a client is a start and a
count. A client's id is its place among all clients, the same in all splits.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedblend.checks import PART, WHOLE, Instance, gate
from fedblend.core import PyTree, Shard
from fedblend.data.dataset import DataError
from fedblend.data.preprocess.preprocessing import Preprocessing, fit
from fedblend.data.preprocess.schema import EncodedColumns, Schema
from fedblend.data.readers.clients import Columns, Kind, is_dataset, read_clients
from fedblend.errors import SettingError, UserError, show_value


@dataclasses.dataclass(frozen=True)
class Shards:
    """One split of all clients: client i owns ``counts[i]`` rows from ``starts[i]``.

    ``starts`` of several datasets in the same arrays are [datasets, clients].
    ``origin`` has the number of each row of the arrays among the rows that were split;
    None where these are the arrays themselves.
    """

    examples: PyTree
    starts: np.ndarray
    counts: np.ndarray
    origin: np.ndarray | None = None

    @property
    def capacity(self) -> int:
        """The largest number of rows of any client."""
        return max(int(self.counts.max(initial=0)), 1)

    @property
    def total(self) -> int:
        """The number of rows of all clients."""
        return int(self.counts.sum())

    def preprocess(self, preprocessing: Preprocessing) -> "Shards":
        """The same rows with the inputs that a preprocessing makes of encoded ones."""
        inputs, *others = self.examples
        made = (preprocessing.transform_encoded(inputs), *others)
        return dataclasses.replace(self, examples=made)

    def numbers(self, clients: np.ndarray) -> np.ndarray:
        """The numbers of the clients' rows, [datasets, clients, rows] with padding."""
        places = np.atleast_2d(self.starts[..., clients])[..., None]
        inside = np.arange(self.capacity) < self.counts[clients, None]
        places = np.where(inside, places + np.arange(self.capacity), 0)
        return places if self.origin is None else self.origin[places]

    def shard(self, client: int) -> Shard:
        """The data of one client, as an algorithm's client functions take it."""
        start, count, id = (
            jnp.asarray(number, jnp.int32)
            for number in (self.starts[..., client], self.counts[client], client)
        )
        return Shard(self.examples, start, count, id, self.capacity)

    def rows(self, client: int) -> PyTree:
        """The rows of one client."""
        start, count = self.starts[client], self.counts[client]
        return jax.tree.map(lambda leaf: leaf[start : start + count], self.examples)


@dataclasses.dataclass(frozen=True)
class FederatedData:
    """The data of all clients.

    ``names`` are the clients' own names, by id; ``validation`` and ``test`` are None
    where no rows were held out; ``preprocessing`` made the inputs of a raw table;
    ``label_names`` are the names of the classes, by number, where these have some.
    """

    train: Shards
    validation: Shards | None = None
    test: Shards | None = None
    names: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    label_names: tuple[str, ...] = ()

    def __post_init__(self):
        empty = np.flatnonzero(self.train.counts == 0)
        if empty.size:
            raise ValueError(
                f"federated_data: client {self.name(int(empty[0]))!r} has no training "
                f"rows ({empty.size} of {self.clients} clients are empty); every "
                "client needs at least 1"
            )

    def __repr__(self) -> str:
        rows = [f"{of.total} {name}" for name, of in self.splits.items()]
        return f"FederatedData: {self.clients} clients, {', '.join(rows)} rows"

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train.counts)

    @property
    def splits(self) -> dict[str, Shards]:
        """The splits that exist, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    @property
    def validates(self) -> bool:
        """Whether any client has validation rows."""
        return self.validation is not None and self.validation.total > 0

    def holding_out(self, fraction: float) -> "FederatedData":
        """The same clients with this fraction of their training rows for validation.

        ``federate`` shuffles rows, so the first ones are a fair sample. Clients with
        fewer than three rows train on all of them.
        """
        train = self.train
        held = rows_held_out(train.counts, fraction)
        return dataclasses.replace(
            self,
            train=Shards(train.examples, train.starts + held, train.counts - held),
            validation=Shards(train.examples, train.starts, held),
        )

    def name(self, client: int) -> str:
        """The name of a client: its own, or its number."""
        return self.names[client] if self.names else str(client)

    def select(self, clients: Sequence[int]) -> "FederatedData":
        """These clients alone, in this order: with their names, and new ids from 0.

        The rows of all other clients are dropped, so that results are the same as if
        those clients did not exist.
        """

        def some(split: Shards) -> Shards:
            places = [(split.starts[id], split.counts[id]) for id in clients]
            parts = [np.arange(start, start + count) for start, count in places]
            found = gather(split.examples, parts)
            if split.origin is None:
                return found
            return dataclasses.replace(found, origin=split.origin[found.origin])

        chosen = {name: some(split) for name, split in self.splits.items()}
        names = tuple(self.name(int(id)) for id in clients)
        return dataclasses.replace(self, **chosen, names=names)

    def preprocess(self, preprocessing: Preprocessing) -> "FederatedData":
        """The same rows with the inputs that a preprocessing makes of encoded ones."""
        made = {
            name: split.preprocess(preprocessing) for name, split in self.splits.items()
        }
        return dataclasses.replace(self, **made, preprocessing=preprocessing)


FEDERATED_DATA = Instance(FederatedData, "a FederatedData")
PARTITION = Instance(Iterable, "a list with the row numbers of each client")


def fit_preprocessing(schema: Schema, data: FederatedData) -> Preprocessing:
    """The preprocessing of a raw table, from the training rows of these clients.

    Args:
        schema: of the table.
        data: clients whose inputs are columns as encoded by the schema.
    """
    clients = [data.train.rows(client)[0] for client in range(data.clients)]
    return fit(schema, clients)


def side_by_side(datasets: Sequence[FederatedData]) -> dict[str, Shards]:
    """The same clients with their rows split anew in each: one flat array a split.

    One dataset keeps its arrays; those of several lie one after another. Arrays that
    several datasets share, such as those of a grid or of folds, are there once.

    Raises:
        ValueError: the datasets have other clients, or hold out other numbers of rows.
    """
    first, *others = datasets
    for other in others:
        same = first.names == other.names and first.splits.keys() == other.splits.keys()
        if not same or not all(
            np.array_equal(split.counts, other.splits[name].counts)
            for name, split in first.splits.items()
        ):
            raise ValueError(
                "federated_data: several must have the same clients, with as many rows "
                "in each split"
            )
    if not others:
        return first.splits
    joined = {}
    for name, split in first.splits.items():
        examples, starts, origin = join_rows([data.splits[name] for data in datasets])
        joined[name] = Shards(examples, np.stack(starts), split.counts, origin)
    return joined


def join_rows(
    parts: Sequence[Shards],
) -> tuple[PyTree, list[np.ndarray], np.ndarray]:
    """The rows of all parts one after another, where clients start, and origins."""
    different = {id(part.examples): part for part in parts}
    rows = [part.examples for part in different.values()]
    sizes = [len(jax.tree.leaves(examples)[0]) for examples in rows]
    edges = dict(zip(different, np.cumsum([0, *sizes[:-1]]), strict=True))
    examples = jax.tree.map(lambda *rows: np.concatenate(rows), *rows)
    starts = [part.starts + edges[id(part.examples)] for part in parts]
    origins = [
        np.arange(size) if part.origin is None else part.origin
        for part, size in zip(different.values(), sizes, strict=True)
    ]
    return examples, starts, np.concatenate(origins)


def shard_of(rows: PyTree) -> Shard:
    """All rows as one shard, such as the server's own data.

    >>> shard_of((np.zeros((3, 2)), np.zeros(3))).capacity
    3
    """
    count = len(jax.tree.leaves(rows)[0])
    return Shards(rows, np.array([0]), np.array([count])).shard(0)


@gate(validation=PART, test=PART, seed=WHOLE, split=WHOLE)
def federate(
    rows: PyTree,
    partition: Iterable[np.ndarray] | None = None,
    *,
    validation: float = 0.0,
    test: float = 0.0,
    test_rows: PyTree | None = None,
    test_partition: Iterable[np.ndarray] | None = None,
    names: Sequence[str] = (),
    seed: int = 0,
    split: int = 0,
    time: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    client: str | None = None,
    target: str = "label",
    inputs: str | Sequence[str] | None = None,
    kind: Kind | None = None,
) -> FederatedData:
    """Federated data from flat arrays and each client's row numbers, or from clients.

    Args:
        rows: a tree of arrays over all rows, such as ``(inputs, labels)``, or a
            ``Dataset`` of PyTorch or Hugging Face. Without a partition the clients: a
            list or a mapping of ``(inputs, labels)``, a ``Dataset`` or ``DataLoader``
            of each; a partitioner of Flower Datasets; one Hugging Face ``Dataset``; or
            a folder of images, ``"root"`` of ``root/client/class/image.png``.
        partition: for every client, the numbers of its rows; a ``Partition``, or any
            list of arrays. A row belongs to one client at most.
        validation: fraction of every client's rows held out for validation.
        test: fraction held out for testing; at least one row where it is not zero
            and the client has three or more.
        test_rows: rows of a separate test set, with ``test_partition``.
        test_partition: each client's rows of the separate test set; several clients may
            have the same.
        names: the clients' own names; by default those of the ``Partition``.
        seed: of the shuffle of each client's rows.
        split: another number shuffles the rows of each client anew, and holds out as
            many, but others.
        time: when each row was. A client's last rows are for testing, those before for
            validation, the first ones to train on; another ``split`` ends earlier, by
            the number of its test rows.
        groups: which rows belong together, such as the patient of each row: all of them
            train, or validate, or test.
        client: the column of a Hugging Face ``Dataset`` with the client of each row.
        target: its column of labels.
        inputs: its columns of inputs; all others if None.
        kind: what labels of clients, or of a ``Dataset``, are: "classes", which are
            numbered, or "regression". If None, texts and whole numbers are classes,
            also 0.0 and 1.0 or -1.0 and 1.0 alone; other floats are numbers.
    """
    label_names, columns = (), Columns(client, target, inputs)
    if partition is None:
        rows, partition, own, label_names = read_clients(rows, columns, kind)
        names = names or own
    elif is_dataset(rows):
        rows, _, _, label_names = read_clients([rows], columns, kind)
    PARTITION("federate: partition", partition)
    if any(isinstance(leaf, EncodedColumns) for leaf in jax.tree.leaves(rows)):
        raise DataError(
            "federate: these rows are those of a raw table, and no inputs yet; "
            "fb.data.federate_dataset(dataset, partition) preprocesses them"
        )
    if validation + test >= 1:
        raise UserError(
            "federate: validation + test", validation + test, "below 1, to train on"
        )
    if (test_rows is None) != (test_partition is None):
        raise DataError("federate: test_rows and test_partition need each other")
    names = tuple(str(name) for name in names or getattr(partition, "names", ()))
    parts = row_numbers("federate: partition", partition, rows)
    require_one_owner("federate: partition", parts)
    if len(names) not in (0, len(parts)):
        allowed = f"one name for each of the {len(parts)} clients"
        raise UserError("federate: names", names, allowed)
    pieces = [
        hold_out_rows(
            index,
            client,
            validation=validation,
            test=test,
            seed=seed,
            split=split,
            time=time,
            groups=groups,
        )
        for client, index in enumerate(parts)
    ]
    train_index, validation_index, test_index = zip(*pieces, strict=True)
    if test_partition is not None:
        own = row_numbers("federate: test_partition", test_partition, test_rows)
        if len(own) != len(parts):
            allowed = f"of the {len(parts)} clients of partition"
            raise UserError("federate: test_partition", len(own), allowed)
        tested = gather(test_rows, own)
    else:
        tested = gather(rows, test_index) if test else None
    return FederatedData(
        train=gather(rows, train_index),
        validation=gather(rows, validation_index) if validation else None,
        test=tested,
        names=names,
        label_names=label_names,
    )


def hold_out_rows(
    index: np.ndarray,
    client: int,
    *,
    validation: float,
    test: float,
    seed: int,
    split: int = 0,
    time: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A client's rows to train on, to validate and to test, shuffled.

    By time, each part begins with its latest rows.
    """
    drawn = (seed, client, split) if split else (seed, client)
    draw = np.random.default_rng(drawn)
    order = draw.permutation(np.asarray(index))
    to_test, to_validate = (
        int(rows_held_out(len(order), part)) for part in (test, validation)
    )
    to_validate = max(min(to_validate, len(order) - to_test - 1), 0)
    if groups is not None:
        return _hold_out_groups(order, groups[order], to_validate, to_test, draw)
    if time is not None:
        order = order[np.argsort(-time[order], kind="stable")]
        spare = len(order) - to_test - to_validate - 1
        order = order[max(min(split * to_test, spare), 0) :]
    first, second = to_test, to_test + to_validate
    return order[second:], order[first:second], order[:first]


def _hold_out_groups(
    order: np.ndarray,
    groups: np.ndarray,
    to_validate: int,
    to_test: int,
    draw: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole groups to train on, to validate and to test.

    What is left of the group that completes a part is in no part. One group at least
    trains.
    """
    which = np.unique(groups, return_inverse=True)[1]
    place = draw.permutation(which.max(initial=0) + 1)[which]
    by_group = np.argsort(place, kind="stable")
    order, place = order[by_group], place[by_group]
    last = int(np.searchsorted(place, place[-1:])[0]) if len(place) else 0

    def part(start: int, count: int) -> tuple[int, int]:
        """Where so many rows end, and where the group of the last one does."""
        stop = min(start + count, last)
        after = np.searchsorted(place, place[stop - 1], "right") if stop > start else 0
        return stop, max(int(after), start)

    tested, first = part(0, to_test)
    validated, second = part(first, to_validate)
    return order[second:], order[first:validated], order[:tested]


def equalize(federations: Sequence[FederatedData]) -> list[FederatedData]:
    """The same clients in each split with as many rows in every part: the first ones.

    Splits by time or by groups differ in their numbers of rows.
    """
    least = {
        name: np.min([one.splits[name].counts for one in federations], axis=0)
        for name in federations[0].splits
    }
    return [
        dataclasses.replace(
            one,
            **{
                name: dataclasses.replace(split, counts=least[name])
                for name, split in one.splits.items()
            },
        )
        for one in federations
    ]


def rows_held_out(counts: np.ndarray | int, fraction: float) -> np.ndarray:
    """The number of rows held out of each count: at least one of three or more."""
    some = np.maximum(np.rint(counts * fraction).astype(np.int64), 1)
    return np.where((counts < 3) | (fraction == 0), 0, some)


def gather(rows: PyTree, partition: Iterable[np.ndarray]) -> Shards:
    """The clients' rows, one after another."""
    partition = list(partition)
    counts = np.array([len(index) for index in partition], np.int64)
    order = np.concatenate([np.asarray(i, np.int64) for i in partition])
    starts = np.cumsum(counts) - counts
    examples = jax.tree.map(lambda leaf: np.asarray(leaf)[order], rows)
    return Shards(examples, starts, counts, order)


def row_numbers(key: str, partition: Iterable[Any], rows: PyTree) -> list[np.ndarray]:
    """The row numbers of each client, checked against the rows.

    Args:
        key: names the partition in an error.
        partition: for every client, the numbers of its rows.
        rows: a tree of arrays over all rows.
    """
    leaves = jax.tree.leaves(rows)
    lengths = {np.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or () in lengths:
        seen = f"arrays of shapes {', '.join(str(np.shape(leaf)) for leaf in leaves)}"
        raise UserError("federate: rows", rows, "a tree of arrays over all rows", seen)
    if any(np.asarray(leaf).dtype.kind in "OUS" for leaf in leaves):
        allowed = "made of numbers; texts are labels in a list of clients or a table"
        raise UserError("federate: rows", rows, allowed)
    ((count,),) = lengths
    parts = [np.asarray(part) for part in partition]
    if not parts:
        raise UserError(key, parts, PARTITION.called)
    for client, part in enumerate(parts):
        numbers = part.dtype.kind in "iu" or not part.size
        if part.ndim != 1 or not numbers:
            seen = f"{show_value(part)} of client {client}"
            raise UserError(key, part, "a list of row numbers", seen)
        outside = part[(part < 0) | (part >= count)]
        if outside.size:
            seen = f"row {outside[0]} of client {client}"
            raise UserError(key, part, f"in [0, {count - 1}], the rows there are", seen)
    return parts


def require_one_owner(key: str, parts: list[np.ndarray]) -> None:
    """Refuse a row of two clients: one may train on what the other holds out."""
    rows = np.concatenate(parts).astype(np.int64)
    uses = np.bincount(rows, minlength=1)
    row = int(uses.argmax())
    if uses[row] > 1:
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        first, second = owner[rows == row][:2]
        raise SettingError(
            key,
            f"row {row} is listed for client {first} and again for client {second}; "
            "a row belongs to one client, once",
        )

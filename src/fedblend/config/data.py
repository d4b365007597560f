# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The data of a configuration: its rows, who holds them, what identifies them.

Rows of the server (``[central]``) are some classes, or a random share, of the dataset,
and no client has them; or they are in a file of their own. A part of them is for
testing. Populations (``[populations.NAME]``) are clients that are drawn together.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.attack import poisoned as poisoned
from fedblend.config.schema import tables
from fedblend.config.schema.table import arguments
from fedblend.data import datasets
from fedblend.data.dataset import (
    DataError,
    Dataset,
    Rows,
    Task,
    generator,
    task_of,
)
from fedblend.data.federated import (
    FederatedData,
    federate,
    fit_preprocessing,
    one_class_clients,
    split_clients,
)
from fedblend.data.partition.partition import Partition, as_arrays, divide
from fedblend.data.preprocess.preprocessing import Preprocessing
from fedblend.data.readers.checks import index_like, tells_target, wild_scales
from fedblend.data.readers.read import read, read_new_rows
from fedblend.data.shards import dataset_in, open_shards
from fedblend.errors import ConfigError
from fedblend.simulation.sampling import Strata

SEEN = 10_000
"""Rows of a folder that are looked at for warnings."""


def load_dataset(data: tables.Data) -> Dataset:
    """The rows that ``[data]`` names."""
    if isinstance(data, tables.Nodes):
        raise ConfigError(
            'data.partition: "nodes": the rows are elsewhere; fedblend federation run '
            "is for that"
        )
    if data.source is not None:
        return datasets.load(data.source, **data.options)
    assert data.file is not None
    if isinstance(data, tables.InFolder):
        return dataset_in(data.file)
    return read(
        Path(data.file),
        target=data.target,
        client=data.client,
        inputs=data.inputs,
        drop=data.drop or (),
        kind=data.kind,
        preprocess=data.preprocess,
    )


def share_out(data: tables.Data, dataset: Dataset) -> Partition:
    """The rows of every client, as ``[data]`` asks for them."""
    if isinstance(data, tables.Stored):
        return Partition.load(data.path)
    if isinstance(data, tables.InFolder):  # which has the rows of clients in order
        return Partition((), description={"folder": dataset.sha256})
    labels = dataset.rows[1]
    facts = {"rows": len(labels), "labels": labels, "keys": dataset.keys}
    share = tables.PARTITIONS[data.partition]
    return share(**arguments(share, data, facts))


def splits_of(data: tables.Data, seed: int | list[int]) -> list[int]:
    """The numbers of the splits: one for every seed, or the one that is fixed."""
    if data.split_seed is not None:
        return [data.split_seed]
    if isinstance(data, tables.InFolder):  # whose rows are shuffled for good
        return [0]
    return [seed] if isinstance(seed, int) else seed


def hold_out(
    data: tables.Data, dataset: Dataset, parts: Partition, splits: list[int]
) -> tuple[Sequence[FederatedData], Sequence[FederatedData]]:
    """The clients in each split, and in each those that take no part in training."""
    every = [_split(data, dataset, parts, split) for split in splits]
    unseen: Sequence[FederatedData] = ()
    if data.unseen:
        pairs = [split_clients(one, data.unseen, data.seed) for one in every]
        every, unseen = zip(*pairs, strict=True)
    schema = dataset.schema
    if schema is None:
        return every, unseen
    fitted = [fit_preprocessing(schema, one) for one in every]
    seen = [one.preprocessed(own) for one, own in zip(every, fitted, strict=True)]
    # Clients that take no part in training take none in the statistics, either.
    others = zip(unseen, fitted, strict=False)
    return seen, [one.preprocessed(own) for one, own in others]


def _split(
    data: tables.Data, dataset: Dataset, parts: Partition, split: int
) -> FederatedData:
    """The clients, with the rows that are held out in a split of this number."""
    if isinstance(data, tables.InFolder):
        held: dict[str, Any] = {"validation": data.validation, "test": data.test}
        return open_shards(str(data.file), **held)
    try:
        return divide(
            dataset,
            parts,
            validation=data.validation,
            test=data.test,
            seed=data.seed,
            split=split,
        )
    except DataError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from None


def set_aside(
    table: tables.Central | None, dataset: Dataset, target: str | None, seed: int
) -> tuple[Dataset, FederatedData | None]:
    """The clients' rows, and the server's as a federation of one.

    Raises:
        DataError: the rows cannot be divided so.
    """
    if table is None or table.penalty is not None:
        return dataset, None
    if table.file is not None:
        if dataset.schema is not None:  # read when its preprocessing is known
            return dataset, None
        return dataset, own_rows(table, task_of(dataset), target, seed)
    if dataset.sha256:
        raise DataError("central: the server's rows need a file beside a folder's")
    inputs, targets = dataset.rows
    mine = _mine(table, dataset, seed)
    if mine.all() or not mine.any():
        raise DataError(
            f"central: the server would have {mine.sum()} of {len(mine)} rows"
        )
    keys = None if dataset.keys is None else np.asarray(dataset.keys)[~mine]
    clients = dataset._replace(rows=(inputs[~mine], targets[~mine]), keys=keys)
    return clients, _held(table, (inputs[mine], targets[mine]), seed)


def preprocess_server(
    table: tables.Central | None,
    server: FederatedData | None,
    dataset: Dataset,
    target: str | None,
    seed: int,
    federations: Sequence[FederatedData],
) -> FederatedData | None:
    """The server's rows with the inputs of a raw table that the clients' make.

    Raises:
        DataError: seeds with splits of their own have a preprocessing of their own.
    """
    if table is None or table.penalty is not None or dataset.schema is None:
        return server
    if len(federations) > 1:
        raise DataError(
            "central: the server's rows need one preprocessing, and each of "
            f"{len(federations)} splits has its own; data.split_seed makes them one"
        )
    fitted = federations[0].preprocessing
    assert fitted is not None
    if server is not None:
        return server.preprocessed(fitted)
    return own_rows(table, task_of(dataset), target, seed, fitted)


def own_rows(
    table: tables.Central,
    task: Task,
    target: str | None,
    seed: int,
    preprocessing: Preprocessing | None = None,
) -> FederatedData:
    """The server's rows from its own file, as a federation of one."""
    assert table.file is not None
    wanted = table.target or target
    new = read_new_rows(table.file, task, target=wanted, preprocessing=preprocessing)
    return _held(table, new.rows, seed)


def _held(table: tables.Central, rows: Rows, seed: int) -> FederatedData:
    everyone = [np.arange(len(rows[0]))]
    own = federate(as_arrays(rows), everyone, test=table.test, seed=seed)
    if table.batch_size is not None and table.batch_size > own.train.total:
        raise DataError(
            f"central.batch_size: {table.batch_size} is more than the server's "
            f"{own.train.total} training rows"
        )
    return own


def _mine(table: tables.Central, dataset: Dataset, seed: int) -> np.ndarray:
    targets = dataset.rows[1]
    if table.classes is None:
        lots = generator(seed, "central").random(len(targets))
        assert table.share is not None
        return lots < np.quantile(lots, table.share)
    if dataset.kind not in ("classes", "binary"):
        raise DataError(f"central.classes: {dataset.kind} targets have no classes")
    absent = sorted(set(table.classes) - set(np.unique(targets).tolist()))
    if absent:
        raise DataError(f"central.classes: no row is of class {absent[0]}")
    return np.isin(targets, table.classes)


def strata(
    populations: Mapping[str, tables.Population] | None, federated_data: FederatedData
) -> Strata | None:
    """What ``simulate`` takes for them.

    Raises:
        DataError: clients do not fall into these populations.
    """
    if populations is None:
        return None
    names = [federated_data.name(client) for client in range(federated_data.clients)]
    inside = np.array([_members(table, names) for table in populations.values()])
    for name, mine in zip(populations, inside, strict=True):
        if not mine.any():
            raise DataError(
                f"populations.{name}.clients: match none of the {len(names)} clients, "
                f"whose names are {names[0]!r} and so on"
            )
    for client, count in enumerate(inside.sum(axis=0)):
        if count != 1:
            own = zip(populations, inside[:, client], strict=True)
            there = " and in ".join(name for name, mine in own if mine)
            raise DataError(
                f"populations: client {names[client]!r} is in "
                f"{there or 'none of ' + ', '.join(populations)}"
            )
    sizes = []
    for (name, table), mine in zip(populations.items(), inside, strict=True):
        sizes.append(int(mine.sum()) if table.cohort is None else table.cohort)
        if sizes[-1] > mine.sum():
            raise ConfigError(
                f"populations.{name}.cohort: {sizes[-1]} is more than its "
                f"{mine.sum()} clients"
            )
    weights = [table.weight for table in populations.values()]
    return Strata(inside.argmax(axis=0), weights, sizes)


def _members(table: tables.Population, names: list[str]) -> list[bool]:
    patterns = [table.clients] if isinstance(table.clients, str) else table.clients
    return [any(fnmatchcase(name, one) for one in patterns) for name in names]


def facts(dataset: Dataset, parts: Partition, splits: list[int]) -> dict[str, Any]:
    """What identifies the data: name, rows, sha256 of rows and partition, splits."""
    return {
        "name": dataset.name,
        "rows": len(dataset.rows[0]),
        "sha256": dataset.sha256 or _digest(dataset),
        "partition_sha256": parts.hash,
        "splits": splits,
    }


def _digest(dataset: Dataset) -> str:
    digest = hashlib.sha256()
    for rows in (dataset.rows, dataset.test_rows or ()):
        for array in rows:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def warnings(
    dataset: Dataset, federated_data: FederatedData, inputs: Any
) -> Iterator[str]:
    """What is odd about the data and its clients, but no error.

    ``inputs`` are the columns that the configuration names, if it does.
    """
    yield from dataset.notes
    if (fitted := federated_data.preprocessing) is not None:
        yield fitted.in_short()
        splits = federated_data.splits.values()
        yield from fitted.warnings(split.examples[0] for split in splits)
    if dataset.sha256:  # a folder's rows need not fit into memory
        some = tuple(array[:SEEN] for array in dataset.rows)
        dataset = dataset._replace(rows=some)
    if inputs is None or not dataset.columns:
        yield from index_like(dataset)
    yield from wild_scales(dataset)
    yield from tells_target(dataset)
    single = one_class_clients(federated_data)
    if single:
        name = federated_data.name(single[0])
        yield (
            f"{len(single)} of {federated_data.clients} clients have training rows of "
            f"one class only (the first is {name!r}); alone they cannot learn another"
        )

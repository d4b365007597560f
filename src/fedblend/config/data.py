# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The data of a configuration: its rows, who holds them, what identifies them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.config.schema import tables
from fedblend.config.schema.table import ConfigError, arguments
from fedblend.data import datasets
from fedblend.data.dataset import DataError, Dataset, index_like, wild_scales
from fedblend.data.federated import FederatedData, one_class_clients
from fedblend.data.partition.partition import Partition, federate_dataset
from fedblend.data.readers.read import read


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
    return read(
        Path(data.file),
        target=data.target,
        client=data.client,
        inputs=data.inputs,
        kind=data.kind,
    )


def share_out(data: tables.Data, dataset: Dataset) -> Partition:
    """The rows of every client, as ``[data]`` asks for them."""
    if isinstance(data, tables.Stored):
        return Partition.load(data.path)
    labels = dataset.rows[1]
    facts = {"rows": len(labels), "labels": labels, "keys": dataset.keys}
    share = tables.PARTITIONS[data.partition]
    return share(**arguments(share, data, facts))


def splits_of(data: tables.Data, seed: int | list[int]) -> list[int]:
    """The numbers of the splits: one for every seed, or the one that is fixed."""
    if data.split_seed is not None:
        return [data.split_seed]
    return [seed] if isinstance(seed, int) else seed


def hold_out(
    data: tables.Data, dataset: Dataset, parts: Partition, split: int
) -> FederatedData:
    """The federation, with the rows that are held out in a split of this number."""
    try:
        return federate_dataset(
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


def facts(dataset: Dataset, parts: Partition, splits: list[int]) -> dict[str, Any]:
    """What identifies the data: name, rows, sha256 of rows and partition, splits."""
    digest = hashlib.sha256()
    for rows in (dataset.rows, dataset.test_rows or ()):
        for array in rows:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return {
        "name": dataset.name,
        "rows": len(dataset.rows[0]),
        "sha256": digest.hexdigest(),
        "partition_sha256": parts.hash,
        "splits": splits,
    }


def warnings(
    dataset: Dataset, federated_data: FederatedData, inputs: Any
) -> Iterator[str]:
    """What is odd about the data and its clients, but no error.

    ``inputs`` are the columns that were asked for, if any were.
    """
    yield from dataset.notes
    if inputs is None or not dataset.columns:
        yield from index_like(dataset)
    yield from wild_scales(dataset)
    single = one_class_clients(federated_data)
    if single:
        name = federated_data.name(single[0])
        yield (
            f"{len(single)} of {federated_data.clients} clients have training rows of "
            f"one class only (the first is {name!r}); alone they cannot learn another"
        )

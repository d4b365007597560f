# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The data of a configuration: its rows, who holds them, what identifies them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.data import checks, own, partition, sources
from fedblend.data.allotment import Partition
from fedblend.data.dataset import (
    DataError,
    Dataset,
    federation_of,
    one_class_clients,
)
from fedblend.data.federation import Federation
from fedblend.experiment import sections
from fedblend.experiment.section import ConfigError


def load_dataset(data: sections.Data) -> Dataset:
    """The rows that ``[data]`` names."""
    if isinstance(data, sections.Nodes):
        raise ConfigError(
            'data.partition: "nodes": the rows are elsewhere; fedblend federation run '
            "is for that"
        )
    if data.source is not None:
        return sources.load(data.source, **data.options)
    assert data.file is not None
    return own.read(
        Path(data.file),
        target=data.target,
        client=data.client,
        inputs=data.inputs,
        kind=data.kind,
    )


def share_out(data: sections.Data, dataset: Dataset) -> Partition:
    """The rows of every client, as ``[data]`` asks for them."""
    labels, seed = dataset.rows[1], data.seed
    if isinstance(data, sections.Iid):
        return partition.iid(len(labels), data.clients, seed)
    if isinstance(data, sections.Contiguous):
        return partition.contiguous(len(labels), data.clients)
    if isinstance(data, sections.ClassesPerClient):
        return partition.classes_per_client(labels, data.clients, data.classes, seed)
    if isinstance(data, sections.ClassPairs):
        pairs: Any = data.pairs
        return partition.class_pairs(labels, data.clients, seed, pairs)
    if isinstance(data, sections.Dirichlet):
        return partition.dirichlet(
            labels, data.clients, data.concentration, seed, data.minimum
        )
    if isinstance(data, sections.Shards):
        return partition.shards(labels, data.clients, data.per_client, seed)
    if isinstance(data, sections.ByKey):
        return partition.by_key(dataset.keys, data.minimum)
    assert isinstance(data, sections.Stored)
    return Partition.load(data.path)


def splits_of(data: sections.Data, seed: int | list[int]) -> list[int]:
    """The numbers of the splits: one for every seed, or the one that is fixed."""
    if data.split_seed is not None:
        return [data.split_seed]
    return [seed] if isinstance(seed, int) else seed


def hold_out(
    data: sections.Data, dataset: Dataset, parts: Partition, split: int
) -> Federation:
    """The federation, with the rows that are held out in a split of this number."""
    try:
        return federation_of(
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


def warnings(dataset: Dataset, federation: Federation, inputs: Any) -> Iterator[str]:
    """What is odd about the data and its clients, but no error.

    ``inputs`` are the columns that were asked for, if any were.
    """
    yield from dataset.notes
    if inputs is None or not dataset.columns:
        yield from checks.index_like(dataset)
    yield from checks.wild_scales(dataset)
    lonely = one_class_clients(federation)
    if lonely:
        name = federation.name(lonely[0])
        yield (
            f"{len(lonely)} of {federation.clients} clients have training rows of one "
            f"class only (the first is {name!r}); alone they cannot learn another"
        )

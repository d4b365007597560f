# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partitions: which client holds which rows."""

from fedblend.data.partition.partition import Partition
from fedblend.data.partition.partitioners import (
    by_key,
    class_pairs,
    classes_per_client,
    contiguous,
    dirichlet,
    iid,
    shards,
)

__all__ = [
    "Partition",
    "by_key",
    "class_pairs",
    "classes_per_client",
    "contiguous",
    "dirichlet",
    "iid",
    "shards",
]

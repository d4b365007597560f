# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Partitions: which client holds which rows."""

from fedblend.data.partition.partition import Partition as Partition
from fedblend.data.partition.partitioners import by_key as by_key
from fedblend.data.partition.partitioners import class_pairs as class_pairs
from fedblend.data.partition.partitioners import (
    classes_per_client as classes_per_client,
)
from fedblend.data.partition.partitioners import contiguous as contiguous
from fedblend.data.partition.partitioners import dirichlet as dirichlet
from fedblend.data.partition.partitioners import iid as iid
from fedblend.data.partition.partitioners import shards as shards

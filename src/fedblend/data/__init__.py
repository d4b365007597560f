# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Data: where rows come from, who holds them, how they are read."""

from fedblend.data.dataset import DataError, Dataset
from fedblend.data.partition.partition import federate_dataset
from fedblend.data.readers.read import read
from fedblend.data.split_clients import split_clients

__all__ = ["DataError", "Dataset", "federate_dataset", "read", "split_clients"]

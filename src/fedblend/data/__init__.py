# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Data: where rows come from, who holds them, how they are read."""

from fedblend.data.dataset import DataError, Dataset, federation_of
from fedblend.data.readers.read import read
from fedblend.data.split_clients import set_apart

__all__ = ["DataError", "Dataset", "federation_of", "read", "set_apart"]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Data: where rows come from, who holds them, how they are read."""

from typing import Any

from fedblend.data.dataset import DataError as DataError
from fedblend.data.dataset import Dataset as Dataset
from fedblend.data.dataset import Task as Task
from fedblend.data.description import describe as describe
from fedblend.data.partition import federate_dataset as federate_dataset
from fedblend.data.preprocess.preprocessing import Preprocessing as Preprocessing
from fedblend.data.readers.read import read as read
from fedblend.data.shards import open_shards as open_shards
from fedblend.data.shards import write_shards as write_shards
from fedblend.data.variants import folds as folds
from fedblend.data.variants import split_clients as split_clients
from fedblend.extras import find_elsewhere


def __getattr__(name: str) -> Any:
    return find_elsewhere(__name__, name)

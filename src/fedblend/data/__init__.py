# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Data: where rows come from, who holds them, how they are read."""

from fedblend.data.dataset import DataError as DataError
from fedblend.data.dataset import Dataset as Dataset
from fedblend.data.dataset import Task as Task
from fedblend.data.description import describe as describe
from fedblend.data.partition import federate_dataset as federate_dataset
from fedblend.data.preprocess.preprocessing import Preprocessing as Preprocessing
from fedblend.data.readers.read import read as read
from fedblend.data.shards import open_shards as open_shards
from fedblend.data.shards import write_shards as write_shards
from fedblend.data.tokenizer import Tokenizer as Tokenizer
from fedblend.data.tokenizer import from_texts as from_texts
from fedblend.data.tokenizer import load_tokenizer as load_tokenizer
from fedblend.data.tokenizer import train_tokenizer as train_tokenizer
from fedblend.data.variants import flip_labels as flip_labels
from fedblend.data.variants import folds as folds
from fedblend.data.variants import split_clients as split_clients

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated learning by mixing: the public names, once.

``import fedblend as fb``: build a federation, pick an algorithm, ``fb.simulate`` it.
"""

from fedblend import data, keys, metrics, mixing, models, objectives, trees
from fedblend.algorithms import (
    fedavg,
    fedopt,
    fedprox,
    finetune,
    local_only,
    scaffold,
)
from fedblend.core import Algorithm, Batch, Down, Heard, Needs, Ragged, Shard, Up
from fedblend.data import partition, sources
from fedblend.data.federation import Federation, federate
from fedblend.local import Epochs, Scheduled, descend
from fedblend.mixing import Blend, predict
from fedblend.models import Model
from fedblend.runtime import checkpoint
from fedblend.runtime.record import Record
from fedblend.runtime.run import Run
from fedblend.runtime.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Batch",
    "Blend",
    "Down",
    "Epochs",
    "Federation",
    "Heard",
    "Model",
    "Needs",
    "Ragged",
    "Record",
    "Run",
    "Scheduled",
    "Shard",
    "Up",
    "checkpoint",
    "data",
    "descend",
    "fedavg",
    "federate",
    "fedopt",
    "fedprox",
    "finetune",
    "keys",
    "local_only",
    "metrics",
    "mixing",
    "models",
    "objectives",
    "partition",
    "predict",
    "scaffold",
    "simulate",
    "sources",
    "trees",
]

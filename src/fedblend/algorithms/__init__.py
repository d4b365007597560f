# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms, one file each: its equations, its reference, both halves."""

from fedblend.algorithms.ditto import ditto
from fedblend.algorithms.apfl import apfl
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.fedopt import fedopt
from fedblend.algorithms.fedprox import fedprox
from fedblend.algorithms.finetune import finetune
from fedblend.algorithms.flix import flix
from fedblend.algorithms.fomaml import fomaml
from fedblend.algorithms.local_only import local_only
from fedblend.algorithms.perfedavg import perfedavg
from fedblend.algorithms.pfedme import pfedme
from fedblend.algorithms.reptile import reptile
from fedblend.algorithms.scaffold import scaffold
from fedblend.algorithms.svrg import svrg

__all__ = [
    "apfl",
    "ditto",
    "fedavg",
    "fedopt",
    "fedprox",
    "finetune",
    "flix",
    "fomaml",
    "local_only",
    "perfedavg",
    "pfedme",
    "reptile",
    "scaffold",
    "svrg",
]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms, one file each: its equations, its reference, both halves."""

from fedblend.algorithms.agnostic import agnostic
from fedblend.algorithms.apfl import apfl
from fedblend.algorithms.apfl_agnostic import apfl_agnostic
from fedblend.algorithms.apfl_averaged import apfl_averaged
from fedblend.algorithms.ditto import ditto
from fedblend.algorithms.fedavg import fedavg
from fedblend.algorithms.fedopt import fedopt
from fedblend.algorithms.fedprox import fedprox
from fedblend.algorithms.fedrep import fedrep
from fedblend.algorithms.finetune import finetune
from fedblend.algorithms.flix import flix
from fedblend.algorithms.fomaml import fomaml
from fedblend.algorithms.l2gd import l2gd
from fedblend.algorithms.local_only import local_only
from fedblend.algorithms.mapper import mapper
from fedblend.algorithms.perfedavg import perfedavg
from fedblend.algorithms.pfedme import pfedme
from fedblend.algorithms.reptile import reptile
from fedblend.algorithms.scaffold import scaffold
from fedblend.algorithms.svrg import svrg

__all__ = [
    "agnostic",
    "apfl",
    "apfl_agnostic",
    "apfl_averaged",
    "ditto",
    "fedavg",
    "fedopt",
    "fedprox",
    "fedrep",
    "finetune",
    "flix",
    "fomaml",
    "l2gd",
    "local_only",
    "mapper",
    "perfedavg",
    "pfedme",
    "reptile",
    "scaffold",
    "svrg",
]

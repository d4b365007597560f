# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transforms: functions from an algorithm to an algorithm, one file each."""

from fedblend.transforms.add_gradient import add_gradient
from fedblend.transforms.clip import adaptive_clip, clip
from fedblend.transforms.compressed import compressed
from fedblend.transforms.diana import diana
from fedblend.transforms.downlink import downlink
from fedblend.transforms.dp_fedavg import dp_fedavg
from fedblend.transforms.dp_ftrl import dp_ftrl
from fedblend.transforms.ef21 import ef21
from fedblend.transforms.fedselect import fedselect
from fedblend.transforms.local_dp import local_dp
from fedblend.transforms.mixed_fl.mixed_fl import mixed_fl
from fedblend.transforms.perm_k import perm_k
from fedblend.transforms.sparse_rows import entries_touched

__all__ = [
    "adaptive_clip",
    "add_gradient",
    "clip",
    "compressed",
    "diana",
    "downlink",
    "dp_fedavg",
    "dp_ftrl",
    "ef21",
    "entries_touched",
    "fedselect",
    "local_dp",
    "mixed_fl",
    "perm_k",
]

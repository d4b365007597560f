# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Transforms: from an algorithm to an algorithm, one file each."""

from fedblend.transforms.clip import adaptive_clip, clip
from fedblend.transforms.compressed import compressed
from fedblend.transforms.diana import diana
from fedblend.transforms.downlink import downlink
from fedblend.transforms.dp_fedavg import dp_fedavg
from fedblend.transforms.dp_ftrl import dp_ftrl
from fedblend.transforms.ef21 import ef21
from fedblend.transforms.fedselect import fedselect
from fedblend.transforms.mixed_fl.mixed_fl import mixed_fl
from fedblend.transforms.partial_correction import partial_correction
from fedblend.transforms.perm_k import perm_k_compressed
from fedblend.transforms.sparse_rows import entries_touched

__all__ = [
    "adaptive_clip",
    "clip",
    "compressed",
    "diana",
    "downlink",
    "dp_fedavg",
    "dp_ftrl",
    "ef21",
    "entries_touched",
    "fedselect",
    "mixed_fl",
    "partial_correction",
    "perm_k_compressed",
]

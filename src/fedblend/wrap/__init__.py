# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers: from an algorithm to an algorithm, one file each."""

from fedblend.wrap.clipped import clipped, clipped_by_quantile
from fedblend.wrap.compressed import compressed
from fedblend.wrap.diana import diana
from fedblend.wrap.downlink import downlink
from fedblend.wrap.ef21 import ef21
from fedblend.wrap.mixed import mixed
from fedblend.wrap.nudged import nudge_only
from fedblend.wrap.permuted import permuted
from fedblend.wrap.private import private
from fedblend.wrap.private_by_tree import private_by_tree
from fedblend.wrap.rows import entries_touched
from fedblend.wrap.select import select

__all__ = [
    "clipped",
    "clipped_by_quantile",
    "compressed",
    "diana",
    "downlink",
    "ef21",
    "entries_touched",
    "mixed",
    "nudge_only",
    "permuted",
    "private",
    "private_by_tree",
    "select",
]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers: from an algorithm to an algorithm, one file each."""

from fedblend.wrap.compressed import compressed
from fedblend.wrap.diana import diana
from fedblend.wrap.downlink import downlink
from fedblend.wrap.ef21 import ef21
from fedblend.wrap.permuted import permuted

__all__ = ["compressed", "diana", "downlink", "ef21", "permuted"]

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters of low rank (LoRA, ICLR 2022) on federated clients: text and images."""

from fedblend_reproductions.adapters.images import L2
from fedblend_reproductions.adapters.language import L1
from fedblend_reproductions.claims import Claim

TITLE = "What adapters do for federated clients, measured"

CLAIMS: tuple[Claim, ...] = (L1, L2)

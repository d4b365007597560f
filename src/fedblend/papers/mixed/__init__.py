# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixed FL (2022): its claims, in the order of the ledger."""

from fedblend.papers.claims import Claim
from fedblend.papers.mixed.agreement import M1
from fedblend.papers.mixed.recovered import M2

TITLE = "What Mixed FL claims, measured"

CLAIMS: tuple[Claim, ...] = (M1, M2)

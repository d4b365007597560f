# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL (2020): its claims, in the order of the paper."""

from fedblend.papers.apfl.convex import A1, A2
from fedblend.papers.apfl.images import A4
from fedblend.papers.apfl.relatives import A6, A6B
from fedblend.papers.apfl.writers import A5
from fedblend.papers.claims import Claim

TITLE = "What APFL claims, measured"

CLAIMS: tuple[Claim, ...] = (A1, A2, A4, A5, A6, A6B)

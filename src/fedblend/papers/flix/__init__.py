# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX (AISTATS 2022): its claims, in the order of the paper."""

from fedblend.papers.claims import Claim

TITLE = "What FLIX claims, measured"

CLAIMS: tuple[Claim, ...] = ()

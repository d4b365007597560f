# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""APFL (2020): its claims, in the order of the paper."""

from fedblend_reproductions.apfl.alpha_rate import A11
from fedblend_reproductions.apfl.bound import A9
from fedblend_reproductions.apfl.convex import A1, A2
from fedblend_reproductions.apfl.diversity import A8
from fedblend_reproductions.apfl.images import A4
from fedblend_reproductions.apfl.learned_alpha import A3
from fedblend_reproductions.apfl.new_clients import A7
from fedblend_reproductions.apfl.personal_methods import A6, A6B
from fedblend_reproductions.apfl.schedules import A10
from fedblend_reproductions.apfl.writers import A5
from fedblend_reproductions.claims import Claim

TITLE = "What APFL claims, measured"

CLAIMS: tuple[Claim, ...] = (
    A1,
    A2,
    A3,
    A4,
    A5,
    A6,
    A6B,
    A7,
    A8,
    A9,
    A10,
    A11,
)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX (AISTATS 2022): its claims, in the order of the paper."""

from fedblend_reproductions.claims import Claim
from fedblend_reproductions.flix.bounds_and_plans import F2, F10
from fedblend_reproductions.flix.descent import F3
from fedblend_reproductions.flix.images import F9A
from fedblend_reproductions.flix.neighborhood import F5
from fedblend_reproductions.flix.one_shot import F1
from fedblend_reproductions.flix.sines import F7
from fedblend_reproductions.flix.sparse_diana import F4
from fedblend_reproductions.flix.tag_steps import F11
from fedblend_reproductions.flix.tags import F8
from fedblend_reproductions.flix.text import F9B
from fedblend_reproductions.flix.unregularized import F6

TITLE = "What FLIX claims, measured"

CLAIMS: tuple[Claim, ...] = (F1, F2, F3, F4, F5, F6, F7, F8, F9A, F9B, F10, F11)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""FLIX (AISTATS 2022): its claims, in the order of the paper."""

from fedblend.papers.claims import Claim
from fedblend.papers.flix.descent import F3
from fedblend.papers.flix.images import F9A
from fedblend.papers.flix.neighbourhood import F5
from fedblend.papers.flix.one_shot import F1
from fedblend.papers.flix.promises import F2, F10
from fedblend.papers.flix.sines import F7
from fedblend.papers.flix.sparse_diana import F4
from fedblend.papers.flix.tag_steps import F11
from fedblend.papers.flix.tags import F8
from fedblend.papers.flix.text import F9B
from fedblend.papers.flix.unregularised import F6

TITLE = "What FLIX claims, measured"

CLAIMS: tuple[Claim, ...] = (F1, F2, F3, F4, F5, F6, F7, F8, F9A, F9B, F10, F11)

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The table ``[federation]``: data only."""

from typing import Annotated, Literal

from fedblend.checks import Number
from fedblend.config.schema.table import Count, Index, Positive, Share, Table, within


class Federation(Table):
    """How the server of a federation waits for its nodes, and whom it believes."""

    deadline: Positive = 600.0
    resend: Positive = 120.0
    attempts: Count = 20
    quorum: Share = 1.0
    spare: Index = 0
    longest_update: Positive | None = None
    longest_rest: Positive | None = None
    largest_answer: Count | None = None
    norm_ratio: Positive | None = 100.0
    clip_ratio: Positive | None = 3.0
    weight_ratio: Annotated[float, within(Number(least=1))] | None = 3.0
    max_rows: Count = 1_000_000
    secure: bool = False
    secure_bits: Literal[32, 64] = 64
    secure_clip: Positive = 65536.0

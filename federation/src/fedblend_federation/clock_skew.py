# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Clocks that differ: the link accepts a node's signature for some minutes only."""

import time
from email.utils import parsedate_to_datetime

MAX_BEHIND, MAX_AHEAD = 250.0, 4.0
"""Seconds by which a clock may be behind the link's, or ahead of it, without a remark;
Flower refuses signatures beyond 300, and 5."""


def clock_remark(date: str | None) -> str | None:
    """How far this machine's clock is off, if the link would accept no signature.

    Args:
        date: the header ``Date`` of a response, None if it has none.
    """
    try:
        there = parsedate_to_datetime(date or "")
    except ValueError:
        return None
    ahead = time.time() - there.timestamp()
    if -MAX_BEHIND < ahead < MAX_AHEAD:
        return None
    where = "ahead of" if ahead > 0 else "behind"
    return f"this machine's clock is {abs(ahead):.0f} s {where} the link's"

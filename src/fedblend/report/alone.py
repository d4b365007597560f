# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""How long training alone took, in words; its numbers are never shown without."""

from collections.abc import Mapping
from typing import Any


def briefly(alone: Mapping[str, Any] | None) -> str:
    """For a legend.

    >>> briefly({"rounds": 290}), briefly({"rounds": None}), briefly(None)
    ('290 rounds', 'own best round', '')
    """
    if alone is None:
        return ""
    rounds = alone["rounds"]
    if rounds is None:
        return "own best round"
    return f"{rounds} round{'' if rounds == 1 else 's'}"


def in_full(alone: Mapping[str, Any]) -> str:
    """For a table.

    >>> in_full({"rounds": 290, "chosen_on": "validation rows", "metric": "accuracy",
    ...          "tried": 600})
    '290 rounds, the best of 600 tried for accuracy on validation rows'
    """
    rows = alone.get("chosen_on")
    if rows is None:
        return f"{briefly(alone)}, as asked"
    if alone["rounds"] is None:
        return f"every client's own best round for {alone['metric']} on {rows}"
    of = f"the best of {alone['tried']} tried"
    return f"{briefly(alone)}, {of} for {alone['metric']} on {rows}"

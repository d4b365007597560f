# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Who gains and who is harmed, in words: the same numbers in every report."""

from typing import Any

from fedblend.gains import GainSummary

ALONE = {"local": "alone", "shared": "with the shared model"}
RIVALS = {"local": "training alone", "shared": "the shared model"}


def in_short(found: GainSummary, other: str) -> str:
    """How many clients are harmed, for the title of a figure.

    >>> from fedblend.gains import GainSummary
    >>> two = GainSummary(2, 0.5, 0.1, 0.2, 0.1, 1, 4, 0, 0, 3, 1, 0.0, -0.1, 0.1)
    >>> in_short(two, "local")
    '2 of 4 clients do worse than alone'
    """
    said = f"{found.count} of {found.clients} clients do worse than {ALONE[other]}"
    return said + (f", {found.not_finite} not finite" if found.not_finite else "")


def in_words(found: GainSummary, other: str, whose: str = "") -> str:
    """Who is harmed and by how much, who is helped, and what nobody can tell.

    >>> from fedblend.gains import GainSummary
    >>> two = GainSummary(2, 0.5, 0.1, 0.2, 0.1, 1, 4, 0, 0, 3, 1, 0.0, -0.1, 0.1)
    >>> for part in in_words(two, "local").split("; "):
    ...     print(part)
    2 of 4 clients do worse than alone, by 0.1 on average and 0.2 at worst
    1 do better, 1 could be either (95 % intervals)
    by chance alone up to 0.1 would be called worse
    mean gain 0 (-0.1 to 0.1)
    """
    who, parts = f"{whose}clients", []
    if found.not_finite:
        parts.append(f"{found.not_finite} {who} have a model that is not finite")
    if found.unmatched:
        parts.append(f"for {found.unmatched} {RIVALS[other]} is not finite")
    if found.clients:
        of = f"{found.count} of {found.clients} {who} do worse than {ALONE[other]}"
        if found.count:
            mean, worst = found.mean_loss, found.worst
            of += f", by {mean:.3g} on average and {worst:.3g} at worst"
        either = found.clients - found.count - found.helped
        parts += [
            of,
            f"{found.helped} do better, {either} could be either (95 % intervals)",
            f"by chance alone up to {found.by_chance:.2g} would be called worse",
            f"mean gain {found.mean_gain:.3g} ({_ends(found)})",
        ]
    return "; ".join(parts) or f"no {whose}clients to compare with {RIVALS[other]}"


def _ends(found: GainSummary) -> str:
    return f"{found.mean_gain_low:.3g} to {found.mean_gain_high:.3g}"


def tally_from(plain: dict[str, Any]) -> GainSummary | None:
    """A tally out of JSON, where what is not finite is null; None for an older one."""
    if set(plain) != set(GainSummary._fields):
        return None
    nan: Any = float("nan")
    return GainSummary(
        **{name: nan if of is None else of for name, of in plain.items()}
    )

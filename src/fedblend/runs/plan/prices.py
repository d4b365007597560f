# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What communication costs: a price for a bit each way, or the speed of the link.

Prices are relative: a number for a bit up and one for a bit down. Of speeds, the cost
is the time that messages take, clients side by side, one way after the other, without
latency and computation.
"""

import math
import re
from typing import NamedTuple

from fedblend.errors import SettingError, UserError

THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
NUMBER = r"([0-9.]+(?:e[+-]?[0-9]+)?)"


class Prices(NamedTuple):
    """Of a bit, up and down; ``seconds`` where they come from speeds."""

    up: float = 1.0
    down: float = 1.0
    seconds: bool = False

    def cost(self, up: float, down: float, clients: int) -> float:
        """Of these bits of all clients: a sum of prices, or seconds."""
        paid = self.up * up + self.down * down
        return paid / clients if self.seconds else paid


def parse_prices(up: float | str | None, down: float | str | None) -> Prices:
    """The prices in two numbers or texts: 1 and 0.1, or "10Mbit/s" and "100Mbit/s".

    >>> parse_prices(1, "0.1")
    Prices(up=1.0, down=0.1, seconds=False)
    >>> parse_prices("10Mbit/s", "100Mbit/s").up
    1e-07
    """
    if up is None and down is None:
        return Prices()
    found = []
    for name, text in (("up", up), ("down", down)):
        if text is None:
            raise SettingError(name, "is missing; give the prices of both ways")
        allowed = "a price from 0 on, or a speed above 0 such as 10Mbit/s"
        value, unit = _number(name, text, "/s", allowed)
        if unit and not value:
            raise UserError(name, text, allowed)
        found.append((1 / value if unit else value, unit))
    (first, is_speed), (second, also_speed) = found
    if is_speed != also_speed:
        both = f"{up} and {down}"
        raise UserError("up, down", both, "two prices, or two speeds", both)
    if first == second == 0:
        raise UserError("up, down", 0, "a pair of prices of which one is above 0")
    return Prices(first, second, is_speed)


def parse_bits(bits: float | str) -> float:
    """A number of bits, with or without a unit.

    >>> parse_bits(1e6), parse_bits("2.5Mbit"), parse_bits("3 kB")
    (1000000.0, 2500000.0, 24000.0)
    """
    units = ", ".join(f"{prefix}bit, {prefix}B" for prefix in THOUSANDS)
    allowed = f"a number of bits from 0 on, with or without one of {units}"
    return _number("bits", bits, "", allowed)[0]


def _number(
    name: str, given: float | str, end: str, allowed: str
) -> tuple[float, bool]:
    """A number in bits, or bits per second, and whether it had a unit."""
    unit = rf"([kMGT]?)(bit|B){end}"
    match = re.fullmatch(rf"\s*{NUMBER}\s*(?:{unit})?\s*", str(given))
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise UserError(name, given, allowed)
    return value * THOUSANDS[match[2] or ""] * (8 if match[3] == "B" else 1), bool(
        match[3]
    )

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


def parsed_prices(up: str | None, down: str | None) -> Prices:
    """The prices in two texts, such as "1" and "0.1", or "10Mbit/s" and "100Mbit/s".

    >>> parsed_prices("1", "0.1")
    Prices(up=1.0, down=0.1, seconds=False)
    >>> parsed_prices("10Mbit/s", "100Mbit/s").up
    1e-07
    """
    if up is None and down is None:
        return Prices()
    found = []
    for name, text in (("--up", up), ("--down", down)):
        if text is None:
            raise SettingError(name, "is missing; give the prices of both ways")
        found.append(_parsed(name, text))
    (first, is_speed), (second, also_speed) = found
    if is_speed != also_speed:
        both = f"{up} and {down}"
        raise UserError("--up, --down", both, "two prices, or two speeds", both)
    if first == second == 0:
        raise UserError("--up, --down", 0, "a pair of prices of which one is above 0")
    return Prices(first, second, is_speed)


def _parsed(name: str, text: str) -> tuple[float, bool]:
    """The price of a bit, and whether it comes from a speed."""
    match = re.fullmatch(rf"\s*{NUMBER}\s*(?:([kMGT]?)(bit|B)/s)?\s*", text)
    allowed = "a price from 0 on, or a speed above 0 such as 10Mbit/s"
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise UserError(name, text, allowed)
    if match[3] is None:
        return value, False
    speed = value * THOUSANDS[match[2]] * (8 if match[3] == "B" else 1)
    if speed <= 0:
        raise UserError(name, text, allowed)
    return 1 / speed, True

# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers as whole numbers modulo 2^32 or 2^64, so that masks cancel exactly.

A client's number x with weight w <= 1 becomes ``round(2^f * clip(w * x))``, where clip
bounds by C in absolute value. f is such that the sum of all n clients fits:
``n * C * 2^f < 2^(bits - 1)``. The decoded sum is
then off by at most ``n * 2^-(f + 1)`` from that of the clipped numbers, besides the
rounding of float64.

What is clipped is the weighted number, and weights are coarse: a server that knows the
weights, and makes numbers of which it knows all but the sign, would read the signs of
all clients from a sum in which each of them weighs something else.
"""

from math import frexp
from typing import NamedTuple

import numpy as np


class FixedPoint(NamedTuple):
    """An encoding for sums over so many clients."""

    bits: int
    """Of a whole number: 32 or 64."""
    clip: float
    """Largest absolute value of a client's number."""
    clients: int

    @property
    def dtype(self) -> np.dtype:
        """That of encoded numbers."""
        return np.dtype(np.uint32 if self.bits == 32 else np.uint64)

    @property
    def fraction_bits(self) -> int:
        """f; negative where not even whole numbers have room."""
        # Each of up to 2**15 clients may round up by a half.
        _, exponent = frexp(self.clients * self.clip * (1 + 2.0**-16))
        return self.bits - 1 - exponent

    @property
    def error(self) -> float:
        """The largest error of a sum of clipped numbers."""
        return self.clients * 2.0 ** -(self.fraction_bits + 1)

    def encode(self, values: np.ndarray, weight: float) -> np.ndarray:
        """A client's numbers, weighted and clipped; the weight is at most 1."""
        clipped = np.clip(values * weight, -self.clip, self.clip)
        whole = np.rint(clipped * 2.0**self.fraction_bits)
        return whole.astype(np.int64).astype(self.dtype)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """The sum of encoded numbers, as float64."""
        signed = total.view(np.int32 if self.bits == 32 else np.int64)
        return signed.astype(np.float64) * 2.0**-self.fraction_bits

    def clipped(self, values: np.ndarray, weight: float) -> int:
        """How many of a client's numbers are clipped, or no numbers."""
        return values.size - int((np.abs(values * weight) <= self.clip).sum())


def coarse(weights: np.ndarray) -> np.ndarray:
    """Each weight rounded up to a power of two.

    >>> coarse(np.array([0.0, 1.0, 40.0, 64.0])).tolist()
    [0.0, 1.0, 64.0, 64.0]
    """
    mantissa, exponent = np.frexp(weights)
    return np.ldexp(np.where(mantissa > 0.5, 1.0, mantissa), exponent)

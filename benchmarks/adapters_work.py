# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""What ``adapters.py`` and its peers have in common: sizes, weights, rows."""

import zlib
from typing import NamedTuple

import numpy as np

RATE = 0.01
ADAPTED = ("query", "key", "value", "out")


class Size(NamedTuple):
    """Of the base, of the adapters, and of a round."""

    vocabulary: int = 50257
    length: int = 128
    width: int = 768
    layers: int = 12
    heads: int = 12
    rank: int = 8
    clients: int = 1000
    rows: int = 32
    cohort: int = 64
    steps: int = 10
    batch: int = 8

    @property
    def hidden(self) -> int:
        """The width inside of the feedforward half."""
        return 4 * self.width


FULL = Size()
SMALL = Size(101, 16, 32, 2, 2, 2, 20, 8, 4, 2, 2)


def weight(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of this path, float32: as GPT-2 starts, and the same for everybody."""
    if path.endswith("scale"):
        return np.ones(shape, np.float32)
    if path.endswith(("offset", "bias")):
        return np.zeros(shape, np.float32)
    draws = np.random.default_rng(zlib.crc32(path.encode()))
    return 0.02 * draws.standard_normal(shape, np.float32)


def rows(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens of all clients, and the tokens after them."""
    draws = np.random.default_rng(0)
    shape = (size.clients * size.rows, size.length + 1)
    tokens = draws.integers(0, size.vocabulary, shape, np.int32)
    return tokens[:, :-1], tokens[:, 1:]
